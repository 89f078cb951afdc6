"""A server as one side: its dialect defines requests and how to read answers; threads keep it busy."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from ostro.errors import BadRequest, OstroError
from ostro.measure.compare.answers import Outcome, Prompt, Recorder
from ostro.measure.compare.http_client import Event, Server
from ostro.sampling_params import SamplingParams


class Dialect(Protocol):
    @property
    def server(self) -> Server: ...

    @property
    def model(self) -> str: ...

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raises BadRequest for anything the dialect cannot express."""

    def find_model(self) -> None:
        """Asks the server for the model's name, unless it was given."""

    def request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, Mapping[str, object]]:
        """Path and body."""

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        """Records an event's content."""


class HttpSide:
    def __init__(self, reference: str, dialect: Dialect) -> None:
        self.reference = reference
        self._dialect = dialect

    @property
    def model(self) -> str:
        return self._dialect.model

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        self._dialect.check(prompts, params)

    def prepare(self) -> None:
        self._dialect.find_model()

    def open(self) -> None:
        pass

    def answers(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, concurrency: int
    ) -> Iterator[tuple[int, Outcome]]:
        waiting = deque(enumerate(prompts))
        done: SimpleQueue[tuple[int, Outcome | BaseException]] = SimpleQueue()

        def work() -> None:
            while waiting:
                try:
                    index, prompt = waiting.popleft()
                except IndexError:
                    # Another thread took the last one.
                    return
                try:
                    done.put((index, self._ask(prompt, params)))
                except BaseException as error:
                    done.put((index, error))
                    raise

        # Daemon threads, so that an interrupt need not wait for a silent server.
        for _ in range(min(concurrency, len(prompts))):
            Thread(target=work, daemon=True, name="compare").start()
        try:
            for _ in prompts:
                index, outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield index, outcome
        finally:
            waiting.clear()

    def close(self) -> None:
        pass

    def _ask(self, prompt: Prompt, params: SamplingParams) -> Outcome:
        recorder = Recorder()
        path, body = self._dialect.request(prompt, params)
        try:
            for event in self._dialect.server.stream(path, body, recorder):
                self._dialect.take(event, recorder, params)
        except OstroError as error:
            return recorder.failure(str(error))
        if recorder.finish_reason is None:
            return recorder.failure("The stream ended without a finish reason: the answer may be cut short.")
        return recorder.answer()


def refuse_chats(prompts: Sequence[Prompt], dialect: str, cure: str) -> None:
    """For dialects without conversations."""
    if any(not isinstance(prompt, str) for prompt in prompts):
        raise BadRequest(f"{dialect} takes no messages (--chat): {cure}", param="messages")


def text_at(event: Event, *names: str) -> str:
    """The first of these fields that is a string."""
    return next((value for name in names if isinstance(value := event.get(name), str)), "")


def count_at(event: Event, *names: str) -> int | None:
    """The first of these fields that is an integer."""
    return next((value for name in names if isinstance(value := event.get(name), int)), None)

"""A server as one side: sends JSON and reads events over our own client's connections, with threads to keep it busy.
Its dialect defines requests and how to read answers.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from ostro.client.calls import Question, as_json
from ostro.client.client import Client
from ostro.client.events import DONE, EventDecoder
from ostro.client.failures import error_in, shortened, words
from ostro.errors import BadAnswer, OstroError, ServerError
from ostro.measure.compare.answers import Outcome, Prompt, Recorder
from ostro.sampling_params import SamplingParams

Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    """Maximum seconds of silence."""

    def get(self, path: str) -> object:
        """The JSON at a path."""
        question = Question("GET", path, refusal=_refusal)
        with self._client() as client, client.exchange(question, self.timeout) as answer:
            return _json(answer.read())

    def stream(self, path: str, body: Mapping[str, object], recorder: Recorder) -> Iterator[Event]:
        """The events of an answer. The recorder's clock starts when the request is sent, after connecting."""
        question = Question("POST", path, as_json(body), accept="text/event-stream", refusal=_refusal)
        decoder = EventDecoder()
        with self._client() as client, client.exchange(question, self.timeout, on_send=recorder.start) as answer:
            for data in answer.iter_bytes():
                for payload in decoder.feed(data):
                    if payload == DONE:
                        return
                    yield _event(payload)

    def _client(self) -> Client:
        """A new client per request, for a fresh connection. No key means none: never send our own to other servers."""
        return Client(self.url, self.key or "")


def _event(payload: bytes) -> Event:
    event = _json(payload)
    if not isinstance(event, dict):
        raise BadAnswer(f"An event is not a JSON object: {shortened(payload)}")
    if event.get("error") and (error := error_in(payload)) is not None:
        raise error
    return event


def _json(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"The answer is not JSON: {shortened(payload)}") from error


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> OstroError:
    return ServerError(f"HTTP {status}: {words(body) or 'no message'}", status=status)


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

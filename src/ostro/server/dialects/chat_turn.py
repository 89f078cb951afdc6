"""Takes a chat request through a job: prepares it for the engine, and reads its output as events. Knows no wire format.

    turn = CompleteTurn(lambda: chat_request(request, …), is_long=…)
    Job.written(name, turn.prepare, writer, streams=…)

    writer(model, completions)      reader = turn.reader(completions[0])
                                    for delta in deltas: for event in reader.events(delta): …

A dialect's request is translated here, inside the admission gate: nothing is computed for a request before it.
All dialects write the same events, so one request gets the same text, calls and counts in each of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from ostro.answers.events import Event, Reasoning, Text
from ostro.answers.reader import AnswerReader
from ostro.engine.request import Request
from ostro.errors import SequenceFailed
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.server.dialects.chat_request import ChatRequest, PreparedChat
from ostro.server.dialects.writing import Counts, Outcome
from ostro.server.models.served import Model
from ostro.text.offsets import text_offsets
from ostro.text.tokenizer import Tokenizer


class ChatTurn(ABC):
    """One request, for one job."""

    def __init__(self, *, is_long: bool) -> None:
        """The request is translated off the event loop if the conversation `is_long`."""
        self._is_long = is_long
        self._request: ChatRequest | None = None
        self._prepared: PreparedChat | None = None

    @abstractmethod
    def _translated(self) -> ChatRequest: ...

    async def request(self, model: Model) -> ChatRequest:
        """Translated once, even if the model was reloaded."""
        if self._request is None:
            translate = self._translated
            self._request = await model.service.run_off_loop(translate) if self._is_long else translate()
        return self._request

    async def prepare(self, model: Model) -> list[Request]:
        """For `Job.prepare`. Called again if the model was reloaded: the last result counts."""
        return await self._prepare(await self.request(model), model)

    async def _prepare(self, request: ChatRequest, model: Model) -> list[Request]:
        source = request.format_source
        with nullcontext() if source is None else source.named_in_errors():
            self._prepared = await model.service.prepare_chat(request, adapter=model.adapter)
        return [self._prepared.request]

    def reader(self, completion: Completion) -> "CompletionReader":
        """Create it before the completion's first delta."""
        assert self._request is not None, "prepare the turn first"
        return CompletionReader(completion, self._ready, shows_reasoning=self._request.reasoning.include)

    @property
    def _ready(self) -> PreparedChat:
        assert self._prepared is not None, "prepare the turn first"
        return self._prepared


class CompleteTurn(ChatTurn):
    """A turn whose request refers to nothing else."""

    def __init__(self, translate: Callable[[], ChatRequest], *, is_long: bool) -> None:
        super().__init__(is_long=is_long)
        self._translate = translate

    def _translated(self) -> ChatRequest:
        return self._translate()


class CompletionReader:
    """Reads the choices of one completion as events."""

    def __init__(
        self, completion: Completion, prepared: PreparedChat | None = None, *, shows_reasoning: bool = True
    ) -> None:
        """Without `prepared`, the whole output is text."""
        self.completion = completion
        self._prepared = None if prepared is None or prepared.reading.is_plain else prepared
        self._shows_reasoning = shows_reasoning
        reading = None if self._prepared is None else self._prepared.reading
        self._readers = [None if reading is None else reading.reader() for _ in completion.choices]
        self._lengths = [0] * len(completion.choices)

    @property
    def is_plain(self) -> bool:
        """Whether the whole output is text, so that deltas can be written unparsed: a fast path for writers."""
        return self._prepared is None

    def events(self, delta: Delta) -> list[Event]:
        """The events of a delta. A choice's last delta also releases text that was held back."""
        reader = self._readers[delta.index]
        if reader is None:
            begin = self._lengths[delta.index]
            self._lengths[delta.index] += len(delta.text)
            return [Text(delta.text, begin)] if delta.text else []
        found = reader.push(delta.text)
        if delta.finish_reason is not None:
            found += reader.end(cut=_was_cut(self.completion.choices[delta.index]))
        return found if self._shows_reasoning else [event for event in found if not isinstance(event, Reasoning)]

    def finish_reason(self, index: int) -> str:
        """The finish reason of a choice whose last delta was read: stop, length, tool_calls or repetition. Raises
        SequenceFailed if the choice failed.
        """
        choice, reader = self.completion.choices[index], self._readers[index]
        if choice.finish_reason in (None, "error"):
            raise SequenceFailed.of_choice(choice.error)
        if reader is None or self._prepared is None:
            return choice.finish_reason
        return self._prepared.plan.finish_reason(choice.finish_reason, reader)

    def has_open_call(self, index: int) -> bool:
        """Whether a choice whose last delta was read was cut off within a call."""
        reader = self._readers[index]
        return reader is not None and reader.has_open_call

    def num_reasoning(self, tokenizer: Tokenizer) -> int | None:
        """Number of reasoning tokens in all choices so far, shown or not. None if the answer is plain text."""
        if self._prepared is None:
            return None
        pairs = zip(self.completion.choices, self._readers, strict=True)
        return sum(_num_reasoning(choice, reader, tokenizer) for choice, reader in pairs if reader is not None)


class SingleChoiceReader:
    """Reads the one choice of a completion as events and an outcome, for dialects whose answers have one choice."""

    def __init__(self, reader: CompletionReader, model: Model) -> None:
        self._reader = reader
        self._completion = reader.completion
        self._tokenizer = model.service.tokenizer
        self._max_len = None if model.service.info is None else model.service.info.max_len

    def of(self, deltas: Iterable[Delta]) -> list[Event]:
        """The deltas' events. Raises SequenceFailed if the choice failed."""
        events: list[Event] = []
        for delta in deltas:
            events += self._reader.events(delta)
            if delta.finish_reason is not None:
                self._reader.finish_reason(delta.index)
        return events

    @property
    def choice(self) -> Choice:
        """The choice that it reads."""
        [choice] = self._completion.choices
        return choice

    @property
    def counts(self) -> Counts:
        """Counts so far, without reasoning tokens."""
        read = self._completion
        return Counts(prompt=len(read.prompt_ids), cached=read.num_cached, generated=read.num_generated)

    def outcome(self) -> Outcome:
        """The outcome of a choice that has ended."""
        choice = self.choice
        length = len(self._completion.prompt_ids) + len(choice.token_ids)
        return Outcome(
            counts=Counts(
                prompt=len(self._completion.prompt_ids),
                cached=self._completion.num_cached,
                generated=len(choice.token_ids),
                reasoning=self._reader.num_reasoning(self._tokenizer) or 0,
            ),
            reason="length" if self._is_cut(choice) else "stop",
            stopped_by=choice.stopped_by,
            context_full=self._max_len is not None and length >= self._max_len,
        )

    def _is_cut(self, choice: Choice) -> bool:
        reason = self._reader.finish_reason(choice.index)
        return reason in ("length", "repetition") or self._reader.has_open_call(choice.index)


def _was_cut(choice: Choice) -> bool:
    """Whether it was cut off by a limit or a stop string."""
    return choice.finish_reason != "stop" or choice.stopped_by is not None


def _num_reasoning(choice: Choice, reader: AnswerReader, tokenizer: Tokenizer) -> int:
    """Counts tokens up to the end of the reasoning, so that the count does not depend on how the text was split."""
    if not reader.reasoning:
        return 0
    end = choice.text.find(reader.reasoning) + len(reader.reasoning)
    return sum(offset < end for offset in text_offsets(choice.token_ids, choice.text, tokenizer))

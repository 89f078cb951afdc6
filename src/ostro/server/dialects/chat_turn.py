"""Takes a chat request through a job: prepares it for the engine, and reads its output as events. Knows no wire format.

    turn = ChatTurn(chat_request)
    Job(name, turn.prepare, respond, chunks)

    respond(model, completions)     for answer in turn.answers(completions[0]): …      the whole answer
    chunks(model, completions)      stream = turn.stream(completions[0])               the answer, streamed
                                    for delta in deltas: for event in stream.events(delta): …

All dialects write the same events, so one request gets the same text, calls and counts in each of them.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ostro.answers.events import Call, Event, Reasoning, Text
from ostro.answers.reader import AnswerReader
from ostro.engine.request import Request
from ostro.engine.runner import TokenLogprob
from ostro.errors import SequenceFailed
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.server.dialects.chat_request import ChatRequest, PreparedChat
from ostro.server.models.served import Model
from ostro.text.offsets import text_offsets
from ostro.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One choice of a finished answer."""

    index: int
    text: str
    reasoning: str
    """Empty if there is none, or if the request excludes it."""
    calls: Sequence[Call]
    finish_reason: str
    """stop, length, tool_calls or repetition."""
    stopped_by: str | None
    """The stop string that ended it, if one did."""
    logprobs: Sequence[TokenLogprob] | None
    """Log-probabilities of all tokens, whatever part of the answer they belong to."""


class ChatTurn:
    """One request, for one job."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self._prepared: PreparedChat | None = None

    async def prepare(self, model: Model) -> list[Request]:
        """For `Job.prepare`. Called again if the model was reloaded: the last result counts."""
        source = self.request.format_source
        with nullcontext() if source is None else source.named_in_errors():
            self._prepared = await model.service.prepare_chat(self.request, adapter=model.adapter)
        return [self._prepared.request]

    @property
    def is_plain(self) -> bool:
        """Whether the whole output is text, so that deltas can be written unparsed: a fast path for writers."""
        return self._ready.reading.is_plain

    def answers(self, completion: Completion) -> list[ChatAnswer]:
        """The choices of a finished completion. Raises SequenceFailed if one of them failed."""
        stream = self.stream(completion)
        return [stream.answer(choice) for choice in completion.choices]

    def stream(self, completion: Completion) -> "AnswerStream":
        """A reader of a completion that is being generated. Create it before the completion's first delta."""
        return AnswerStream(completion, self._ready, shows_reasoning=self.request.reasoning.include)

    @property
    def _ready(self) -> PreparedChat:
        assert self._prepared is not None, "prepare the turn first"
        return self._prepared


class AnswerStream:
    """Reads the choices of one completion."""

    def __init__(
        self, completion: Completion, prepared: PreparedChat | None = None, *, shows_reasoning: bool = True
    ) -> None:
        """Without `prepared`, the whole output is text."""
        self._completion = completion
        self._prepared = None if prepared is None or prepared.reading.is_plain else prepared
        self._shows_reasoning = shows_reasoning
        reading = None if self._prepared is None else self._prepared.reading
        self._readers = [None if reading is None else reading.reader() for _ in completion.choices]
        self._lengths = [0] * len(completion.choices)

    def events(self, delta: Delta) -> list[Event]:
        """The events of a delta. A choice's last delta also releases text that was held back."""
        reader = self._readers[delta.index]
        if reader is None:
            begin = self._lengths[delta.index]
            self._lengths[delta.index] += len(delta.text)
            return [Text(delta.text, begin)] if delta.text else []
        found = reader.push(delta.text)
        if delta.finish_reason is not None:
            found += reader.end(cut=_was_cut(self._completion.choices[delta.index]))
        return found if self._shows_reasoning else [event for event in found if not isinstance(event, Reasoning)]

    def finish_reason(self, index: int) -> str:
        """The finish reason of a choice whose last delta was read: stop, length, tool_calls or repetition. Raises
        SequenceFailed if the choice failed.
        """
        choice, reader = self._completion.choices[index], self._readers[index]
        if choice.finish_reason in (None, "error"):
            raise SequenceFailed.of_choice(choice.error)
        if reader is None or self._prepared is None:
            return choice.finish_reason
        return self._prepared.plan.finish_reason(choice.finish_reason, reader)

    def has_open_call(self, index: int) -> bool:
        """Whether a choice whose last delta was read was cut off within a call."""
        reader = self._readers[index]
        return reader is not None and reader.has_open_call

    def answer(self, choice: Choice) -> ChatAnswer:
        """The whole answer of a choice that has ended. Only for a choice of which no delta was read."""
        reader = self._readers[choice.index]
        if reader is not None:
            reader.push(choice.text)
            reader.end(cut=_was_cut(choice))
        return ChatAnswer(
            index=choice.index,
            text=choice.text if reader is None else reader.text,
            reasoning=reader.reasoning if reader is not None and self._shows_reasoning else "",
            calls=() if reader is None else reader.calls,
            finish_reason=self.finish_reason(choice.index),
            stopped_by=choice.stopped_by,
            logprobs=choice.logprobs,
        )

    def num_reasoning(self, tokenizer: Tokenizer) -> int | None:
        """Number of reasoning tokens in all choices so far, shown or not. None if the answer is plain text."""
        if self._prepared is None:
            return None
        pairs = zip(self._completion.choices, self._readers, strict=True)
        return sum(_num_reasoning(choice, reader, tokenizer) for choice, reader in pairs if reader is not None)


def _was_cut(choice: Choice) -> bool:
    """Whether it was cut off by a limit or a stop string."""
    return choice.finish_reason != "stop" or choice.stopped_by is not None


def _num_reasoning(choice: Choice, reader: AnswerReader, tokenizer: Tokenizer) -> int:
    """Counts tokens up to the end of the reasoning, so that the count does not depend on how the text was split."""
    if not reader.reasoning:
        return 0
    end = choice.text.find(reader.reasoning) + len(reader.reasoning)
    return sum(offset < end for offset in text_offsets(choice.token_ids, choice.text, tokenizer))

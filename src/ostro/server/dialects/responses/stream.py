"""Turns the engine's output into a Responses object, as events or as a whole. Knows no sockets."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ostro.answers.events import Event
from ostro.engine.runner import TokenLogprob
from ostro.errors import OstroError
from ostro.frontend.outputs import Delta
from ostro.schemas.responses import ResponseObject
from ostro.server.dialects.openai import chat_logprobs
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.responses.logprobs import MessageLogprobs
from ostro.server.dialects.responses.writer import ResponseWriter
from ostro.server.dialects.single_choice import Reading
from ostro.server.http.sse import PING
from ostro.text.tokenizer import Tokenizer


class ResponseChunks:
    """`keep` is called once the response has ended without an error."""

    ping: Final = PING
    done: Final = b""

    def __init__(
        self, writer: ResponseWriter, reading: Reading, tokenizer: Tokenizer, *, model: str, keep: Callable[[], None]
    ) -> None:
        self._writer = writer
        self._reading = reading
        self._tokenizer = tokenizer
        self._of_message = MessageLogprobs(reading.choice, tokenizer)
        self._keep = keep
        self._has_begun = False
        self.id = writer.id
        self.framing = self
        writer.response["model"] = model

    def start(self) -> bytes:
        # The first event waits for the first output: if there is none, no event must have been numbered.
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        # Read first: if that fails, no event must have been numbered that is never sent.
        read = [(events := self._reading.of([delta]), self._logprobs(delta, events)) for delta in deltas]
        begun = b"" if self._has_begun else self._writer.begin()
        self._has_begun = True
        return begun + b"".join(self._writer.push(events, logprobs) for events, logprobs in read)

    def end(self) -> bytes:
        data = self._writer.finish(self._reading.outcome())
        self._keep()
        return data

    def failed(self, error: OstroError) -> bytes:
        return self._writer.fail(error)

    def whole(self) -> ResponseObject:
        """The response object of an answer that has ended."""
        self.of(0, [self._reading.whole()])
        self.end()
        return ResponseObject.model_validate(self._writer.response)

    def _logprobs(self, delta: Delta, events: Sequence[Event]) -> list[list[Json]]:
        if delta.logprobs is None:
            return []
        return [self._told(entries) for entries in self._of_message.of(delta, events)]

    def _told(self, entries: Sequence[TokenLogprob]) -> list[Json]:
        logprobs = chat_logprobs(entries, self._tokenizer)
        return [] if logprobs is None else [entry.model_dump() for entry in logprobs.content]

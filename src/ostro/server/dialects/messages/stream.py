"""Turns the engine's output into an Anthropic message, as events or as a whole. Knows no sockets."""

from collections.abc import Iterable
from typing import Final

from ostro.errors import OstroError
from ostro.frontend.outputs import Delta
from ostro.schemas.messages import AssistantMessage
from ostro.server.dialects.messages.framing import error_event
from ostro.server.dialects.messages.writer import MessageWriter
from ostro.server.dialects.outcome import sse
from ostro.server.dialects.single_choice import Reading


class MessageChunks:
    ping: Final = sse("ping", {})
    done: Final = b""

    def __init__(self, reading: Reading, *, model: str, request_id: str) -> None:
        self._writer = MessageWriter(model=model)
        self._reading = reading
        self._request_id = request_id
        self._has_begun = False
        self.id = self._writer.id
        self.framing = self

    def start(self) -> bytes:
        # The number of cached prompt tokens is only known with the first output.
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        events = self._reading.of(deltas)
        begun = b"" if self._has_begun else self._writer.begin(self._reading.counts)
        self._has_begun = True
        return begun + self._writer.push(events)

    def end(self) -> bytes:
        return self._writer.finish(self._reading.outcome())

    def failed(self, error: OstroError) -> bytes:
        return error_event(error, self._request_id)

    def whole(self) -> AssistantMessage:
        """The message of an answer that has ended."""
        self.of(0, [self._reading.whole()])
        self.end()
        return AssistantMessage.model_validate(self._writer.message)

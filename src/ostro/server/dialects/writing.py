"""What the writers of all dialects share: their protocol, ids, token counts and outcomes. Plain data."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from ostro.frontend.outputs import Delta
from ostro.schemas.wire import WireModel
from ostro.server.http.sse import Framing


class StreamWriter(Protocol):
    """Writes one answer's events."""

    @property
    def id(self) -> str | None:
        """The answer's id, if it has one."""

    @property
    def framing(self) -> Framing: ...

    def start(self) -> bytes:
        """The events before the first text."""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        """The events for new deltas of prompt `number`. Raises SequenceFailed if a choice failed."""

    def end(self) -> bytes:
        """The events after the last text."""


class AnswerWriter(StreamWriter, Protocol):
    """Writes one answer, as events or as a whole."""

    def whole(self) -> WireModel:
        """The answer of completions that have ended: what all events together say. Call nothing else before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token counts."""

    prompt: int
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    generated: int = 0
    reasoning: int = 0
    """Reasoning tokens, which are among the generated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an answer ended."""

    counts: Counts
    reason: Literal["stop", "length"] = "stop"
    """Finish reason; `length` if it was cut off by a limit, as a loop, or by a stop string within a call."""
    stopped_by: str | None = None
    """The stop string that ended it, if one did."""
    context_full: bool = False
    """With `length`: whether the context was full, rather than the request's own limit reached."""


def new_id(prefix: str) -> str:
    """A random id of 128 bits, like OpenAI's: chatcmpl-…, resp_…"""
    return prefix + secrets.token_hex(16)

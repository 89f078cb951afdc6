"""How an answer ended, and its token counts, for both dialects' writers."""

from dataclasses import dataclass
from typing import Literal

import msgspec

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Token counts."""

    prompt: int
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    generated: int = 0
    reasoning: int = 0
    """Part of the generated tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    counts: Counts
    reason: Literal["stop", "length"] = "stop"
    """`length`: cut off, by a limit, because it ran in a loop, or by a stop string within a call."""
    stopped_by: str | None = None
    """The stop string that ended it, if one did."""
    context_full: bool = False
    """With `length`: whether the context was full, rather than the request's own limit reached."""


def sse(kind: str, fields: dict[str, object]) -> bytes:
    """A server-sent event with its type in the event line and in the data, as in both dialects."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind} | fields) + b"\n\n"

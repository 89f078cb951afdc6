"""How an answer ended and what it cost: what both writers are told at the end."""

from dataclasses import dataclass
from typing import Literal

import msgspec

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens."""

    prompt: int
    cached: int = 0
    """Of the prompt, those found in the prefix cache."""
    generated: int = 0
    reasoning: int = 0
    """Of the generated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    counts: Counts
    reason: Literal["stop", "length"] = "stop"
    """`length`: cut off."""
    stopped_by: str | None = None
    """The stop string that ended it, if one did."""
    context_full: bool = False
    """With `length`: whether it was the context that had no room left, rather than the request's own limit."""


def sse(kind: str, fields: dict[str, object]) -> bytes:
    """A server-sent event that names its type twice, as both dialects do."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind} | fields) + b"\n\n"

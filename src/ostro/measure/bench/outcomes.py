"""Interprets a recorded response: when its tokens arrived, how many there were, or how it failed.

Lenient, because servers differ in what they leave out. Knows OpenAI's response formats; knows no sockets.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal

import msgspec

from ostro.client.events import DONE, EventDecoder
from ostro.client.failures import shortened, words
from ostro.errors import BadAnswer
from ostro.measure.bench.wire import CUT_OFF, Recording

EMPTY, NOT_UNDERSTOOD = "empty answer", "not understood"


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times are in seconds since the level's start (`start`) or since the request's own."""

    index: int
    start: float
    e2e: float
    """Time until the last byte of the answer."""
    late: float | None = None
    """Delay of sending in an open loop: the load generator's fault."""
    connect: float = 0.0
    """Time spent on connecting; zero on a kept-alive connection."""
    resent: bool = False
    """Whether it was resent because its kept-alive connection was closed without an answer."""
    arrivals: list[float] = []
    """Arrival times of events with content; the first is the first token."""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: Literal["usage", "events"] = "usage"
    max_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    """The kind of failure; None on success."""
    detail: str = ""
    stamps: list[float] = []
    """When our null server wrote each arrival; empty for other servers."""
    received: float = 0.0
    """When the null server received the request."""

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Times between consecutive events."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def itl(self) -> float | None:
        """The mean gap."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1) if len(self.arrivals) > 1 else None

    @property
    def tpot(self) -> float | None:
        """Time from the first event to the last, divided by the number of tokens after the first."""
        if len(self.arrivals) < 2 or self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


def read(recording: Recording, *, index: int, began: float, max_tokens: int, due: float | None = None) -> Outcome:
    """The outcome of request `index` of a level that began at `began`. `due` is relative to that."""
    answer = _Answer()
    error, detail = recording.failure, recording.detail
    if error is None and recording.status != 200:
        error, detail = _refusal(recording)
    elif error is None or recording.pieces:
        found = answer.take(recording)
        error, detail = (error, detail) if error else found
    start = recording.sent - began
    return Outcome(
        index=index,
        start=start,
        e2e=recording.ended - recording.sent,
        late=None if due is None else start - due,
        connect=recording.connect_seconds,
        resent=recording.resent,
        arrivals=[at - recording.sent for at in answer.arrivals],
        input_tokens=answer.input_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=len(answer.arrivals) if answer.output_tokens is None else answer.output_tokens,
        counted_by="events" if answer.output_tokens is None else "usage",
        max_tokens=max_tokens,
        finish_reason=answer.finish_reason,
        error=error,
        detail=detail,
        stamps=[at - recording.sent for at in answer.stamps],
        received=answer.received - recording.sent if answer.stamps else 0.0,
    )


class _Answer:
    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stamps: list[float] = []
        self.received = 0.0

    def take(self, recording: Recording) -> tuple[str | None, str]:
        """The kind of failure and its details; None for a complete answer."""
        ended = False
        try:
            for at, payload in _payloads(recording):
                if payload.strip() == DONE:
                    ended = True
                    continue
                event = msgspec.json.decode(payload)
                if not isinstance(event, dict):
                    return NOT_UNDERSTOOD, shortened(payload)
                if event.get("error"):
                    return f"error event{_code(event['error'])}", words(payload)
                self._take(at, event)
        except (msgspec.DecodeError, BadAnswer, RecursionError) as error:
            return NOT_UNDERSTOOD, str(error)
        if not ended and self.finish_reason is None:
            return CUT_OFF, "the stream ended without [DONE] or a finish reason"
        return (None, "") if self.arrivals else (EMPTY, "the answer has no content")

    def _take(self, at: float, event: Mapping[str, object]) -> None:
        match event.get("choices"):
            case [{**choice}, *_]:
                if _content(choice):
                    self.arrivals.append(at)
                if isinstance(reason := choice.get("finish_reason"), str):
                    self.finish_reason = reason
        match event.get("usage"):
            case {**usage}:
                # Some servers send a running count in every event: the last one counts.
                self.input_tokens = _count(usage.get("prompt_tokens"), self.input_tokens)
                self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
                match usage.get("prompt_tokens_details"):
                    case {"cached_tokens": int(cached)}:
                        self.cached_tokens = cached
        match event:
            case {"stamp": float(stamp), "received": float(received)}:
                self.stamps.append(stamp)
                self.received = received


def _payloads(recording: Recording) -> Iterator[tuple[float, bytes]]:
    if b"json" in recording.headers.get(b"content-type", b""):
        # The server does not stream: everything arrived at once, at the end.
        yield recording.ended, recording.body
        return
    decoder = EventDecoder()
    for at, piece in recording.pieces:
        for payload in decoder.feed(piece):
            yield at, payload


def _content(choice: Mapping[object, object]) -> bool:
    """Whether the event has content: text, reasoning, a tool call. A role alone does not count."""
    for place in ("delta", "message"):
        if isinstance(part := choice.get(place), dict):
            return any(part.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))


def _refusal(recording: Recording) -> tuple[str, str]:
    body = recording.body
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = None
    code = _code(value.get("error")) if isinstance(value, dict) else ""
    return f"HTTP {recording.status}{code}", words(body)


def _code(error: object) -> str:
    """An error's own code or type, if it has one, to append to its kind."""
    match error:
        case {"code": str(code)} if code:
            return f" {shortened(code.encode(errors='replace'))}"
        case {"type": str(kind)} if kind:
            return f" {shortened(kind.encode(errors='replace'))}"
    return ""


def _count(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise

"""Responses as server-sent events: framing, keep-alive, errors, a proper end. Knows no tokens."""

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec
from starlette.types import Send

from ostro.errors import OstroError, internal_error

PING: Final = b": ping\n\n"

_encode = msgspec.json.Encoder().encode

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Otherwise nginx buffers events until it has a few kilobytes.
    (b"x-accel-buffering", b"no"),
]


def event(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def typed_event(kind: str, fields: Mapping[str, object]) -> bytes:
    """An event with its type in the event line and in the data."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"


class Framing(Protocol):
    """How a dialect's stream stays alive, ends and fails."""

    @property
    def ping(self) -> bytes:
        """Sent during long silences."""

    @property
    def done(self) -> bytes:
        """Sent after the last event."""

    def failed(self, error: OstroError) -> bytes:
        """Sent in place of the remaining events and of `done`."""


class EventStream:
    """`async with EventStream(send, framing) as events: await events.write(data)`.

    Enter it once the first event is available: this sends status 200, and errors become events.
    """

    def __init__(self, send: Send, framing: Framing, *, ping_seconds: float) -> None:
        self._send = send
        self._framing = framing
        self._ping_seconds = ping_seconds
        self._last = time.monotonic()
        self._writing = False
        self._attendant: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._attendant = asyncio.create_task(self._attend(), name="keep-alive")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sends an error, if there is one, and lets it propagate."""
        attendant = self._attendant
        assert attendant is not None
        # A cancelled task keeps the frame that it was cancelled in, and thereby this object.
        self._attendant = None
        attendant.cancel()
        if error is None:
            await self._end(self._framing.done)
        elif isinstance(error, Exception):
            shown = error if isinstance(error, OstroError) else internal_error()
            await self._end(self._framing.failed(shown))

    async def write(self, data: bytes) -> None:
        """Waits if the client reads more slowly than we write."""
        self._writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False
        self._last = time.monotonic()

    async def _end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _attend(self) -> None:
        """Sends pings during long silences, so that proxies keep the connection open."""
        while True:
            await asyncio.sleep(self._ping_seconds / 2)
            if not self._writing and time.monotonic() - self._last >= self._ping_seconds:
                await self.write(self._framing.ping)

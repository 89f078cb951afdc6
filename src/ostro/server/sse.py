"""An answer as a stream of server-sent events: framing, keep-alive, errors, a proper end. Knows no tokens."""

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from starlette.types import Send

from ostro.errors import OstroError
from ostro.server.disconnect import ClientGone
from ostro.server.error_handlers import internal_error
from ostro.server.schemas import ErrorBody

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Or nginx would hold events back until it has some kilobytes.
    (b"x-accel-buffering", b"no"),
]


def event(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


class EventStream:
    """`async with EventStream(send) as events: await events.write(data)`.

    Enter it with the first event in hand: from then on the status is 200, and an error is one more event.
    """

    def __init__(self, send: Send, *, ping_seconds: float, stuck_seconds: float) -> None:
        self._send = send
        self._ping_seconds = ping_seconds
        self._stuck_seconds = stuck_seconds
        self._last = time.monotonic()
        self._writing = False
        self._stuck = False
        self._attendant: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._attendant = asyncio.create_task(self._attend(asyncio.current_task()), name="keep-alive")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """An OstroError is told and is over with; any other fault is told and goes on."""
        assert self._attendant is not None
        self._attendant.cancel()
        if self._stuck and kind is not None and issubclass(kind, asyncio.CancelledError):
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            raise ClientGone from error
        if error is None:
            await self._end(DONE)
        elif isinstance(error, Exception) and not isinstance(error, ClientGone):
            shown = error if isinstance(error, OstroError) else internal_error()
            await self._end(event(ErrorBody.of(shown).model_dump_json().encode()) + DONE)
        return isinstance(error, OstroError)

    async def write(self, data: bytes) -> None:
        """Waits while the client reads slower than we write."""
        self._writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False
        self._last = time.monotonic()

    async def _end(self, data: bytes) -> None:
        # A client that reads nothing any more, so that its time ran out, would not read this either.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stuck_seconds):
                await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _attend(self, writer: "asyncio.Task[object] | None") -> None:
        """Breaks long silences, so that proxies keep the connection; drops a client that has stopped reading."""
        assert writer is not None
        while not self._stuck:
            await asyncio.sleep(min(self._ping_seconds, self._stuck_seconds) / 2)
            silence = time.monotonic() - self._last
            if self._writing:
                self._stuck = silence >= self._stuck_seconds
            elif silence >= self._ping_seconds:
                self._stuck = not await self._ping()
        writer.cancel()

    async def _ping(self) -> bool:
        """False if the client has taken nothing for too long."""
        try:
            async with asyncio.timeout(self._stuck_seconds):
                await self.write(PING)
        except TimeoutError:
            return False
        return True

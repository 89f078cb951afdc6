"""An answer as a stream of server-sent events: framing, keep-alive, errors, a proper end. Knows no tokens."""

import asyncio
import time
from types import TracebackType
from typing import Final, Self

from starlette.types import Send

from ostro.errors import OstroError
from ostro.schemas import ErrorBody
from ostro.server.error_handlers import internal_error

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

    def __init__(self, send: Send, *, ping_seconds: float) -> None:
        self._send = send
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
        """Tells an error, which then goes on its way."""
        assert self._attendant is not None
        self._attendant.cancel()
        if error is None:
            await self._write(DONE, more=False)
        elif isinstance(error, Exception):
            shown = error if isinstance(error, OstroError) else internal_error()
            await self._write(event(ErrorBody.of(shown).model_dump_json().encode()) + DONE, more=False)

    async def write(self, data: bytes) -> None:
        """Waits while the client reads slower than we write."""
        self._writing = True
        await self._write(data, more=True)
        self._writing = False
        self._last = time.monotonic()

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _attend(self) -> None:
        """Breaks long silences, so that proxies keep the connection."""
        while True:
            await asyncio.sleep(self._ping_seconds / 2)
            if not self._writing and time.monotonic() - self._last >= self._ping_seconds:
                await self.write(PING)

"""Background responses: what replaces the client's connection. Knows ASGI; knows no routes.

The answer is sent as if to a client, and its events are logged. Clients read the log, now or later, from any event on:
an event's sequence number is its index in the log.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import accumulate

from starlette.types import Message

from ostro.errors import RequestTimeout
from ostro.server.dialects.responses.items import Json
from ostro.server.http.sse import PING

# Replays are sent in pieces of this size, so that a slow reader's connection buffers at most one.
_PIECE = 64 << 10
_EVENTS_AT_ONCE = 64


class EventLog:
    """Server-sent events in order. Use within one event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self.longest = 0
        """Size of the longest event so far, which a reader holds even if the log is lost meanwhile."""
        self._changed = asyncio.Event()
        self.is_closed = False
        self.is_lost = False
        """Whether its events were dropped: the response was deleted, or the store is full."""

    def add(self, data: bytes) -> None:
        """Adds one or several events."""
        events = [event + b"\n\n" for event in data.split(b"\n\n") if event]
        self.longest = max([self.longest, *map(len, events)])
        self._events += events
        self._tell()

    def close(self) -> None:
        self.is_closed = True
        self._tell()

    def lose(self) -> None:
        self._events.clear()
        self.longest = 0
        self.is_lost = True
        self.close()

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """The events after that number, in pieces: several events, or parts of a long one. Ends when the log is closed
        or lost, but never within an event.
        """
        begin = number + 1
        while True:
            changed = self._changed
            if begin < len(self._events):
                events = self._piece(begin)
                begin += len(events)
                data = b"".join(events)
                for start in range(0, len(data), _PIECE):
                    yield data[start : start + _PIECE]
            elif self.is_closed:
                return
            else:
                await changed.wait()

    def _piece(self, begin: int) -> list[bytes]:
        """Events from that one on: as many as fit into a piece, at least one."""
        sizes = accumulate(map(len, self._events[begin : begin + _EVENTS_AT_ONCE]))
        number = sum(size <= _PIECE for size in sizes)
        return self._events[begin : begin + max(1, number)]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundRun:
    """The far end of an answer's connection: `receive` and `send` as ASGI has them."""

    def __init__(self, response: Json, *, log: EventLog | None) -> None:
        """`response` is the writer's own, which changes as it runs. Without a log, events are dropped."""
        self.response = response
        self.log = log
        self.is_over = False
        self.was_cancelled = False
        self.task: asyncio.Task[None] | None = None
        """Referenced here so that it is not garbage-collected while it runs."""
        self.has_room: Callable[[int], bool] = lambda num_bytes: True
        """Called with the size of what was logged; returns whether there is room for it."""
        self._num_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Size of the log."""
        return self._num_bytes

    def cancel(self) -> None:
        """Safe to call from any thread. Does nothing if the run is over."""
        if not self.is_over:
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self.was_cancelled = True
        self._left.set()

    def drop(self) -> None:
        """Its response is no longer stored: cancels it, and drops its log. Safe to call from any thread."""
        # The loop may have ended with the server.
        with suppress(RuntimeError):
            self.cancel()
            if self.log is not None:
                self._loop.call_soon_threadsafe(self.log.lose)

    async def ended(self, seconds: float) -> None:
        """Waits until it is over; raises RequestTimeout after `seconds`."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            raise RequestTimeout("The response has not ended yet. Get it later to see what became of it.") from None

    def end(self) -> None:
        """What became of it is stored by then: the response is let go."""
        self.is_over = True
        self.response = {}
        # It refers to what refers to this.
        self.has_room = lambda num_bytes: True
        if self.log is not None:
            self.log.close()
        self._ended.set()

    async def receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.write(message.get("body", b""))

    def write(self, data: bytes) -> None:
        if self.log is None or self.log.is_lost or not data or data == PING:
            return
        self.log.add(data)
        self._num_bytes += len(data)
        if not self.has_room(len(data)):
            self._num_bytes = 0
            self.log.lose()

"""Notices that a client has disconnected, in any phase of its request. Knows ASGI's `receive`; knows no routes.

A server that only sends finds out when it sends: too late for a long prompt or a response that is not streamed. So a
separate task listens, and a disconnect cancels the client's work.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientGone(Exception):
    """The client has disconnected."""


class UntilDisconnect:
    """`async with UntilDisconnect(receive)`: cancels the block when the client disconnects, and raises ClientGone.

    The request's body must have been read, so that `receive` waits for the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._cancelling = 0
        self._task: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._listener = asyncio.create_task(self._listen(), name="disconnect listener")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, listener = self._task, self._listener
        assert task is not None
        assert listener is not None
        # A cancelled task keeps the frame that it was cancelled in, and thereby this object. Drop our references to it,
        # or the cycle would live until the next garbage collection.
        self._task = self._listener = None
        listener.cancel()
        if not self._gone:
            return
        if kind is None:
            # The block ended at the same moment, so the cancellation is still pending: consume it here.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        outer = task.uncancel() > self._cancelling
        if not outer and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise ClientGone from error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._task is not None
        self._gone = True
        self._task.cancel()

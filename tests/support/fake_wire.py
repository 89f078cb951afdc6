"""A connection to `BoundedHttp` without a socket: what a client sends goes in, what it would read comes out."""

import asyncio
from collections import deque
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from ostro.server.http.protocol import BoundedHttp


class FakeWire(asyncio.Transport):
    """The server's end of a connection, and the client's hand on the other. Needs a running event loop."""

    def __init__(self, config: uvicorn.Config, *, port: int = 1) -> None:
        """`port` is the client's: applications tell connections apart by it."""
        super().__init__()
        self.sent = bytearray()
        """What the server has sent."""
        self.is_closed = False
        self.error: Exception | None = None
        """What came out of the protocol, which nothing should."""
        self._socket = _NoSocket(port)
        self._arriving: deque[bytes] = deque()
        self._is_closing = self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self.protocol = BoundedHttp(config, ServerState(), {})
        self.protocol.connection_made(self)

    def client_sends(self, data: bytes) -> None:
        self._arriving.append(data)
        self._deliver()

    def client_leaves(self) -> None:
        self.abort()

    def _deliver(self) -> None:
        while self._arriving and not self._is_paused and not self._is_closing:
            try:
                self.protocol.data_received(self._arriving.popleft())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is to be found out
                self.error = error
                self.abort()

    # --- the server's side --------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self.sent += data

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose)

    def abort(self) -> None:
        self.close()

    def _lose(self) -> None:
        self.is_closed = True
        self.protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default


class _NoSocket:
    def __init__(self, port: int) -> None:
        self._port = port

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80

    def fileno(self) -> int:
        raise OSError("there is no descriptor")


def wire_config(app: ASGIApp, *, keep_alive: int = 5, kind: type[BoundedHttp] = BoundedHttp) -> uvicorn.Config:
    config = uvicorn.Config(
        app, http=kind, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=keep_alive
    )
    config.load()
    return config

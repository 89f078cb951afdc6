"""HTTP on the wire: limits the size and time of what a client sends and reads. Knows uvicorn; knows no routes.

uvicorn limits neither: headers could grow until memory runs out, and a client that stops sending or reading would hold
its connection forever.
"""

import fcntl
import struct
import sys
import termios
from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ostro.errors import BadRequest
from ostro.schemas.wire import ErrorBody
from ostro.server.http.connections import BUSY, Connections

_LONGEST_HEAD: Final = 64 << 10
# The minimum that a client must read in `read_seconds` if that much is pending: no working link is slower.
_LEAST_READ: Final = 32 << 10
_INT: Final = struct.Struct("i")


class Alarm:
    def __init__(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, seconds: float) -> None:
        self.clear()
        self._timer = self._loop.call_later(seconds, self._on_time)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        self._ring()


class BoundedHttp(HttpToolsProtocol):
    head_seconds: float = 30.0
    """Time limit for a request's head, and for the rest of a body that was answered early."""
    read_seconds: float = 60.0
    peers: Connections | None = None
    """The set of connections that this one is counted in, if any."""

    _head_bytes = 0
    _unread = 0
    _running: RequestResponseCycle | None = None
    _is_ending = False
    _data = b""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Closed without a response: it may never have been HTTP, and pools open connections ahead of need.
        self._head_late = Alarm(self.loop, transport.abort)
        self._body_late = Alarm(self.loop, transport.abort)
        self._reader_late = Alarm(self.loop, self._check_reader)
        self._await_head()
        self._tell_peers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peers is not None:
            self.peers.close(self)
        for alarm in (self._head_late, self._body_late, self._reader_late):
            alarm.clear()
        if self._running is not None and self._running is not self.cycle:
            # uvicorn notifies only the last of several pipelined requests.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    # --- receiving ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_late.is_set:
            self._head_bytes += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._head_late.is_set and self._head_bytes > _LONGEST_HEAD and not self.transport.is_closing():
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The request's head is longer than {_LONGEST_HEAD} bytes. Send shorter headers.",
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        if not self._head_late.is_set:
            self._await_head()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_late.clear()
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False
        self._tell_peers()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._tell_peers()
        if self._body_late.is_set:
            self._body_late.clear()
            # uvicorn mistook the body's last bytes for the start of a new request.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _unsupported_upgrade_warning(self) -> None:
        """A client offers to upgrade to another protocol, as Java's does with every request; we decline.

        The parser has stopped after the head, because anything might follow; so a new parser starts over with the head
        minus the offer.
        """
        stopped, method = sys.exception(), self.parser.get_method()
        assert isinstance(stopped, httptools.HttpParserUpgrade)
        if method == b"CONNECT":
            self.send_400_response("")
            return
        version = self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(b"\r\n".join([*lines, b"", self._data[stopped.args[0] :]]))

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP. Check how the client was set up.")

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_late.set(self.head_seconds)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._head_late.clear()
        body = ErrorBody.of(BadRequest(message)).model_dump_json().encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    # --- sending ------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._reader_late.clear()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell_peers()
        if self.transport.is_closing():
            # It closes once everything has been read.
            self._await_reader()
        elif self.cycle.response_complete and self.cycle.more_body:
            self._body_late.set(self.head_seconds)

    def end_keep_alive(self) -> None:
        """Closes the connection, if a request is on its way or being answered, after its response."""
        self._is_ending = True
        if not self.is_head_arriving():
            self.shutdown()

    def is_head_arriving(self) -> bool:
        """Whether the first bytes of a request have come, and not yet its whole head."""
        # On a new connection the alarm is set from the start, later from a request's first byte on.
        return self._head_late.is_set and (self._head_bytes > 0 or self.cycle is not None)

    def has_unsent(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def drop(self) -> None:
        if self._is_idle():
            self.transport.abort()
        else:
            self.transport.write(BUSY)
            self.transport.close()
            self._await_reader()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _tell_peers(self) -> None:
        if self.peers is None:
            return
        if self._is_idle():
            self.peers.fall_idle(self)
        elif self.cycle is self._running and self.cycle.more_body:
            self.peers.begin_request(self)
        else:
            # Or an earlier request is being answered, and the client has pipelined the next one.
            self.peers.begin_answer(self)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reader()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _await_reader(self) -> None:
        if not self._reader_late.is_set:
            self._unread = self._num_unread()
            self._reader_late.set(self.read_seconds)

    def _check_reader(self) -> None:
        if self._unread - self._num_unread() < _LEAST_READ:
            self.transport.abort()
        else:
            self._await_reader()

    def _num_unread(self) -> int:
        """Bytes not yet read by the client: in our buffer, and in the kernel's, which can hold megabytes."""
        waiting = self.transport.get_write_buffer_size()
        # A closed socket has no descriptor.
        with suppress(OSError, ValueError):
            answer = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_INT.size))
            waiting += _INT.unpack(answer)[0]
        return waiting


def bound_uvicorn() -> None:
    """Makes every uvicorn server that this process starts from now on use `BoundedHttp`, whoever starts it."""
    HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"

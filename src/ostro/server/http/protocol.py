"""HTTP on the wire: limits the size and time of what a client sends and reads. Knows uvicorn; knows no routes.

uvicorn limits neither: headers could grow until memory runs out, and a client that stops sending or reading would hold
its connection forever. Of each request:

    part                                     at most                                   within
    head                                     64 KiB, a field counting 32 bytes more    `head_seconds`
    body                                     what its reader allows                    what its reader allows
    body that was answered before it ended   no limit: it is dropped                   `head_seconds`
    chunk sizes, extensions, trailers        64 KiB more than there is body            as its body
    response                                 what the client reads                     `read_seconds` per 32 KiB

Of each connection, sixteen requests may wait while another one is answered.
"""

import fcntl
import struct
import termios
from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ostro.errors import BadRequest
from ostro.schemas.wire import ErrorBody
from ostro.server.http.connections import BUSY, Connections

_LONGEST_HEAD: Final = 64 << 10
# Counted for a field besides its name and value, as HTTP/2 does: many short ones take much memory, too.
_FIELD_BYTES: Final = 32
# Bytes of a request that are not body and that no body makes up for.
_MOST_FRAMING: Final = 64 << 10
# Requests that may wait for the answer to an earlier one on their connection.
_MOST_WAITING: Final = 16
# The minimum that a client must read in `read_seconds` if that much is pending: no working link is slower.
_LEAST_READ: Final = 32 << 10
_INT: Final = struct.Struct("i")


def _refusal(status: HTTPStatus, message: str) -> bytes:
    body = ErrorBody.of(BadRequest(message)).model_dump_json().encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_NOT_HTTP: Final = _refusal(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP. Check how the client was set up.")
_LONG_HEAD: Final = _refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The request's head is longer than {_LONGEST_HEAD} bytes. Send fewer and shorter headers.",
)
_LONG_FRAMING: Final = _refusal(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "The body's chunks are mostly framing. Send larger chunks, without extensions and trailers.",
)


class _Refused(Exception):
    """Raised within the parser's callbacks, where it stops the parser, and after them."""

    def __init__(self, response: bytes) -> None:
        self.response = response


def _response_to(error: Exception) -> bytes:
    # The parser turns what a callback raises into an error of its own.
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
    return cause.response if isinstance(cause, _Refused) else _NOT_HTTP


class _Phase(Enum):
    """The part of a request that the next byte belongs to."""

    START = auto()
    """Nothing of it has come, but for blank lines."""
    HEAD = auto()
    BODY = auto()


class Alarm:
    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, seconds: float, ring: Callable[[], None]) -> None:
        self.clear()
        self._timer = self._loop.call_later(seconds, self._on_time, ring)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self, ring: Callable[[], None]) -> None:
        self._timer = None
        ring()


class BoundedHttp(HttpToolsProtocol):
    head_seconds: float = 30.0
    """Time limit for a request's head, and for the rest of a body that was answered early."""
    read_seconds: float = 60.0
    peers: Connections | None = None
    """The set of connections that this one is counted in, if any."""

    _phase = _Phase.START
    _head_bytes = 0
    _framing = 0
    """Bytes of the current request that are not body, less those that are: never below zero."""
    _num_begun = 0
    """Requests that began in the block that is being read."""
    _unread = 0
    _running: RequestResponseCycle | None = None
    """The request that is being answered, or was last."""
    _is_ending = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_late = Alarm(self.loop)
        self._body_late = Alarm(self.loop)
        self._reader_late = Alarm(self.loop)
        self._await_head()
        self._tell_peers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peers is not None:
            self.peers.close(self)
        for alarm in (self._head_late, self._body_late, self._reader_late):
            alarm.clear()
        self._unset_keepalive_if_required()
        if self._running is not None:
            # uvicorn notifies only the last of several pipelined requests.
            _disconnect(self._running)
        super().connection_lost(exc)
        self._release()

    def _release(self) -> None:
        """Lets go of what the client has sent. Requests refer to their connection, so that both would otherwise stay in
        memory until garbage is collected, which may be long after.
        """
        self.pipeline.clear()
        self.cycle = self._running = None  # type: ignore[assignment]
        self.scope = {}  # type: ignore[typeddict-item]
        self.headers = []

    # --- receiving ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Replaces uvicorn's, which has no limits, and which refuses a request in the middle of an earlier response."""
        if self.transport.is_closing() or self._has_last_request():
            return
        # The parser does not tell how much of this block belongs to a request that begins in it: that part is free,
        # unless nothing else is in it.
        self._framing += len(data)
        began, self._num_begun = self._phase is _Phase.START, 0
        try:
            self._parse(memoryview(data))
            if began and self._num_begun == 1 and self._phase is _Phase.HEAD:
                self._framing = len(data)
            if self._framing > _MOST_FRAMING:
                raise _Refused(_LONG_FRAMING if self._phase is _Phase.BODY else _LONG_HEAD)
        except (httptools.HttpParserError, _Refused) as error:
            self._refuse(_response_to(error))

    def _parse(self, data: memoryview) -> None:
        while (end := self._parse_until_offer(data)) is not None:
            self._decline_offer()
            data = data[end:]

    def _parse_until_offer(self, data: memoryview) -> int | None:
        """Where a head ends that offers to upgrade the connection: the parser stops there. None if there is none."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return int(offer.args[0])
        return None

    def _decline_offer(self) -> None:
        """A client offers to upgrade to another protocol, as Java's does with every request; we decline.

        The parser has ended the request after its head, because anything might follow; so a new parser starts over with
        the head minus the offer.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise _Refused(_NOT_HTTP)
        version = self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _has_last_request(self) -> bool:
        """Whether the connection closes after the requests that it has brought, so that no further ones are read."""
        return self._phase is _Phase.START and self.cycle is not None and not self.cycle.keep_alive

    def on_message_begin(self) -> None:
        if self._has_last_request():
            raise _Refused(_NOT_HTTP)
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._head_bytes = self._framing = 0
        self._num_begun += 1
        self._unset_keepalive_if_required()
        if not self._head_late.is_set:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head it is a trailer, which nobody reads.
        if self._phase is _Phase.HEAD:
            self._count_head(len(name) + len(value) + _FIELD_BYTES)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            raise _Refused(_NOT_HTTP)
        self._head_late.clear()
        super().on_headers_complete()
        self._phase = _Phase.BODY
        if self._is_ending or len(self.pipeline) == _MOST_WAITING:
            # The client is told in the response, and sends what is not answered over another connection.
            self.cycle.keep_alive = False
        self._tell_peers()

    def on_body(self, body: bytes) -> None:
        # It was counted on arrival, and makes up for as much framing.
        self._framing = max(0, self._framing - 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._phase = _Phase.START
        if not self.cycle.response_complete:
            self._tell_peers()
        if self._body_late.is_set:
            self._body_late.clear()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _await_head(self) -> None:
        # Closed without a response: it may never have been HTTP, and pools open connections ahead of need.
        self._head_late.set(self.head_seconds, self.transport.abort)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _LONGEST_HEAD:
            raise _Refused(_LONG_HEAD)

    def _refuse(self, response: bytes) -> None:
        """Answers a request that cannot be read, and closes: nobody knows where the next one begins. Requests before it
        are answered first; then the connection closes without this response.
        """
        self._head_late.clear()
        refused = self.cycle if self._phase is _Phase.BODY else None
        earlier = [cycle for cycle in self._unanswered() if cycle is not refused]
        if earlier:
            if refused is not None:
                self.pipeline.popleft()
            self.cycle, self._phase = earlier[-1], _Phase.START
            self.cycle.keep_alive = False
            return
        if refused is None or not refused.response_started:
            self.transport.write(response)
        if refused is not None:
            _disconnect(refused)
        self.transport.close()
        self._await_reader()

    def _unanswered(self) -> list[RequestResponseCycle]:
        """Requests whose responses are not complete, oldest first."""
        started = [] if self._running is None or self._running.response_complete else [self._running]
        return started + [cycle for cycle, _ in reversed(self.pipeline)]

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
        elif self._phase is not _Phase.START:
            # The keep-alive time begins once a body or a head has ended that is still arriving.
            self._unset_keepalive_if_required()
            if self.cycle.response_complete and self._phase is _Phase.BODY:
                self._body_late.set(self.head_seconds, self.transport.abort)

    def end_keep_alive(self) -> None:
        """Closes the connection, if a request is on its way or being answered, after its response."""
        self._is_ending = True
        if not self.is_head_arriving():
            self.shutdown()

    def is_head_arriving(self) -> bool:
        """Whether the first bytes of a request have come, and not yet its whole head."""
        return self._phase is _Phase.HEAD

    def has_unsent(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def drop(self) -> None:
        if self._is_idle():
            self.transport.abort()
        else:
            self._refuse(BUSY)

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
        # In a process that was stopped for a while, the connection's end may be due at the same time.
        if not self.transport.is_closing():
            super().timeout_keep_alive_handler()
            self._await_reader()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _await_reader(self) -> None:
        if not self._reader_late.is_set:
            self._unread = self._num_unread()
            self._reader_late.set(self.read_seconds, self._check_reader)

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


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tells the request's task that its client is gone."""
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()


def bound_uvicorn() -> None:
    """Makes every uvicorn server that this process starts from now on use `BoundedHttp`, whoever starts it."""
    HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"

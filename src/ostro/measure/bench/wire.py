"""HTTP/1.1 connections that timestamp incoming bytes and do little else. Knows no JSON and no events.

A general client spends more time on an event than a fast server does, which would be attributed to the server. This one
stores each piece of a body with its arrival time, to be parsed once the answer has ended.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from ostro.errors import BadRequest

CONNECTION, TIMEOUT, CUT_OFF, NOT_HTTP = "connection", "timeout", "cut off", "not HTTP"

_LONGEST_BODY = 256 << 20


@dataclass(slots=True)
class Recording:
    """A raw response. Times are time.perf_counter() values."""

    sent: float = 0.0
    """Time at which the request was to be sent: before connecting, if there was no connection."""
    connect_seconds: float = 0.0
    resent: bool = False
    """Whether a kept-alive connection turned out closed, and the request was resent on a new one."""
    ended: float = 0.0
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None
    """Kind of failure below the level of HTTP statuses; `detail` says more."""
    detail: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Target:
    """The address of requests, and their common headers."""

    host: str
    port: int
    secure: bool
    base: str
    """The path before the endpoint's: `/v1`, or a proxy's prefix."""
    authority: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> Self:
        example = "Give one such as http://localhost:8000."
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError as error:
            raise BadRequest(f"The address is invalid: {error}. {example}", param="url") from error
        if "@" in parts.netloc:
            raise BadRequest("Addresses appear in reports: give the key with --api-key, not in the URL.", param="url")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host or parts.query:
            raise BadRequest(f"{url!r} is not a server address. {example}", param="url")
        base = parts.path.rstrip("/")
        secure = parts.scheme == "https"
        base = base if base.endswith("/v1") else base + "/v1"
        return cls(host, port or (443 if secure else 80), secure, base, parts.netloc, dict(headers))

    def request(self, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request: POST if it has a body, else GET."""
        fields = {"Host": self.authority, "Accept-Encoding": "identity", "User-Agent": "ostro-bench"}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{'GET' if body is None else 'POST'} {self.base}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (fields | dict(self.headers)).items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


class Pool:
    """Connections to one target, kept alive between requests; grows with the number of concurrent requests."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._tls = ssl.create_default_context() if target.secure else None
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []

    async def open(self, number: int) -> None:
        """Connects ahead of time. Failures are ignored here: the requests will report them."""
        made = await asyncio.gather(*(self._connect() for _ in range(number)), return_exceptions=True)
        for connection in made:
            if isinstance(connection, _Connection):
                self._idle.append(connection)
            elif not isinstance(connection, OSError | TimeoutError):
                raise connection

    async def ask(self, request: bytes) -> Recording:
        recording = Recording(sent=time.perf_counter())
        if self._idle:
            await self._exchange(self._idle.pop(), request, recording)
            if recording.failure != CONNECTION:
                return recording
            # Closed before any answer, most likely while idle, so it is no failure of this request.
            recording = Recording(sent=recording.sent, resent=True)
        connecting = time.perf_counter()
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            recording.ended = time.perf_counter()
            recording.failure, recording.detail = CONNECTION, str(error) or type(error).__name__
            return recording
        recording.connect_seconds = time.perf_counter() - connecting
        await self._exchange(connection, request, recording)
        return recording

    async def close(self) -> None:
        """Closes all connections, busy or not, and returns when they are gone."""
        ends = [connection.abort() for connection in self._open]
        self._idle.clear()
        if ends:
            await asyncio.wait(ends)

    async def _connect(self) -> "_Connection":
        target = self._target
        async with asyncio.timeout(self._timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, target.host, target.port, ssl=self._tls
            )
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._forget(connection))
        return connection

    def _forget(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _exchange(self, connection: "_Connection", request: bytes, recording: Recording) -> None:
        """Afterwards the connection is idle or closed."""
        reusable = False
        try:
            reusable = await connection.ask(request, recording, self._timeout)
        finally:
            if reusable:
                self._idle.append(connection)
            else:
                connection.abort()


class _Connection(asyncio.Protocol):
    """Handles one exchange at a time."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._recording: Recording | None = None
        self._now = 0.0

    async def ask(self, request: bytes, recording: Recording, timeout: float) -> bool:
        """Fills the recording. Returns whether the connection can be reused."""
        loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[bool] = loop.create_future()
        self._recording = recording
        self._parser = httptools.HttpResponseParser(self)
        self._bytes = 0
        timer = loop.call_later(timeout, self._fail, TIMEOUT, f"no whole answer within {timeout:g} s")
        try:
            if self._transport is None or self._transport.is_closing():
                self._fail(CONNECTION, "the connection was closed")
            else:
                self._transport.write(request)
            return await self._answered
        finally:
            timer.cancel()
            self._recording = None

    def abort(self) -> "asyncio.Future[None]":
        if self._transport is not None:
            self._transport.abort()
        return self.lost

    # --- asyncio callbacks ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance check: uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._recording is None:
            # Unsolicited data.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(NOT_HTTP, str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self._now = time.perf_counter()
        if (recording := self._recording) is None:
            return
        if recording.status and not recording.headers.keys() & {b"content-length", b"transfer-encoding"}:
            # The body ends with the connection.
            self._end(reusable=False)
        elif recording.status:
            self._fail(CUT_OFF, str(exc or "the connection was closed during the answer"))
        else:
            self._fail(CONNECTION, str(exc or "the server closed the connection without an answer"))

    # --- parser callbacks -------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._recording is not None:
            self._recording.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._recording is not None:
            self._recording.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._recording is not None:
            self._recording.pieces.append((self._now, body))
            self._bytes += len(body)
            if self._bytes > _LONGEST_BODY:
                self._fail(NOT_HTTP, f"the answer is longer than {_LONGEST_BODY >> 20} MiB")

    def on_message_complete(self) -> None:
        if self._recording is not None and self._recording.status >= 200:
            self._end(reusable=self._parser.should_keep_alive())

    def _end(self, *, reusable: bool) -> None:
        if self._recording is not None and not self._answered.done():
            self._recording.ended = self._now
            self._answered.set_result(reusable)

    def _fail(self, kind: str, detail: str) -> None:
        if self._recording is not None and not self._answered.done():
            self._recording.ended = time.perf_counter()
            self._recording.failure, self._recording.detail = kind, detail
            self._answered.set_result(False)

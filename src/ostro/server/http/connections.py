"""Limits how many connections may be open, and decides what happens to the next one. Knows sockets and files; of HTTP,
knows only one response.

    accept ──┬── fewer than `most` are open ──────────────> served
             ├── all in use, but some carry no request ───> the one idle for longest is closed: served
             ├── or some have sent only part of one ──────> the one that began first gets 503 and is closed: served
             └── all are busy ────────────────────────────> 503, closed

Connections are limited well below the process's open-file limit: a restarted engine, a model's files and a download
need file descriptors too. A client that opens connections and stays silent, or sends headers without bodies, therefore
blocks nobody.
"""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Final, Protocol

from ostro.errors import BadRequest, Unavailable
from ostro.schemas.wire import ErrorBody

# Files reserved for everything else: an eighth, but at least enough to start engines and load models.
_LEAST_RESERVE: Final = 64
_RESERVE_SHARE: Final = 8
# The most we request from the system, and assume if it has no limit.
_MOST_FILES: Final = 65536
# Connections accepted before anything else gets a turn.
_AT_A_TIME: Final = 32
_PAUSE_SECONDS: Final = 0.5
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raises the limit as far as the system allows: the usual 1024 files are fewer than the requests that may wait.
    Returns the new limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def most_connections(asked: int | None, files: int) -> int:
    """The requested number, or as many as the file limit allows. Raises BadRequest if that is less."""
    reserve = min(max(_LEAST_RESERVE, files // _RESERVE_SHARE), files // 2)
    most = files - reserve
    if asked is not None and asked > most:
        raise BadRequest(
            f"max_connections is {asked}, but this process may open {files} files, of which {reserve} are for engines "
            f"and models. Raise the limit (ulimit -n), or set at most {most}.",
            param="max_connections",
        )
    return asked or most


class Peer(Protocol):
    """A connection, as seen from here."""

    def has_unsent(self) -> bool:
        """Whether its client has yet to read the end of a response."""

    def drop(self) -> None: ...


class Connections:
    """The open connections. Use within one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_open = 0
        # In the order in which they became idle, and in which their requests began.
        self._idle: dict[Peer, None] = {}
        self._receiving: dict[Peer, None] = {}

    def fall_idle(self, connection: Peer) -> None:
        self._forget(connection)
        self._idle[connection] = None

    def begin_request(self, connection: Peer) -> None:
        """The request's head has arrived, its body is still to come."""
        self._forget(connection)
        self._receiving[connection] = None

    def begin_answer(self, connection: Peer) -> None:
        """The whole request has arrived: the connection may no longer be dropped for another."""
        self._forget(connection)

    def close(self, connection: Peer) -> None:
        self._forget(connection)
        self.num_open -= 1

    def has_room(self) -> bool:
        """Whether `make_room` would succeed."""
        return self.num_open < self.most or self._droppable() is not None

    def make_room(self) -> bool:
        """Whether there is room for one more, if necessary by dropping one without a complete request."""
        if self.num_open < self.most:
            return True
        dropped = self._droppable()
        if dropped is None:
            return False
        self._forget(dropped)
        dropped.drop()
        return True

    def _droppable(self) -> Peer | None:
        return next((each for each in chain(self._idle, self._receiving) if not each.has_unsent()), None)

    def _forget(self, connection: Peer) -> None:
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)


class Acceptor:
    """Accepts connections from a listening socket. Replaces asyncio's own, which accepts all pending connections at
    once until there are no file descriptors left.
    """

    def __init__(self, sock: socket.socket, make: Callable[[], asyncio.Protocol], connections: Connections) -> None:
        self._sock = sock
        self._make = make
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            if self._opening and not self._connections.has_room():
                # Connections that are just being opened can be dropped a moment later.
                return
            try:
                client, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                self._rest(error)
                return
            if self._connections.make_room():
                self._open(client)
            else:
                _refuse(client)

    def _rest(self, error: OSError) -> None:
        """File descriptors have run out. Pauses, or the kernel would report the waiting connection again at once."""
        _log.warning("No connection can be accepted (%s). Allow more open files with ulimit -n.", error.strerror)
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(_PAUSE_SECONDS, self._listen)

    def _open(self, client: socket.socket) -> None:
        self._connections.num_open += 1
        client.setblocking(False)
        with suppress(OSError):
            # Tokens are sent one by one: none may wait for the next.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, client)
        except OSError:
            # The client had already disconnected.
            self._connections.num_open -= 1
            client.close()


def _refuse(client: socket.socket) -> None:
    """Sends 503. The request is not read, so the response may get lost; the disconnect does not."""
    client.setblocking(False)
    with suppress(OSError):
        client.send(BUSY)
        client.shutdown(socket.SHUT_WR)
    client.close()


def _busy() -> bytes:
    error = Unavailable("All of this server's connections are busy. Try again in a moment.")
    body = ErrorBody.of(error).model_dump_json().encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: {error.retry_after}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


BUSY: Final = _busy()

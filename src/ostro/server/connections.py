"""How many connections may be open, and what happens to the next one. Knows sockets and files; knows no HTTP but one
answer.

    accept ──┬── fewer than `most` are open ──────────────> served
             ├── all are, and some carry no request ──────> the one that has done so for longest is closed: served
             ├── all do, but some have sent only part ────> the one that began first gets 503 and is closed: served
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
from ostro.schemas import ErrorBody

# Files kept for all else: an eighth of what there is, in any case enough to start engines and to load models.
_LEAST_RESERVE: Final = 64
_RESERVE_SHARE: Final = 8
# What we ask of the system at most; and assume where it sets no limit.
_MOST_FILES: Final = 65536
# Accepted before anything else gets its turn.
_AT_A_TIME: Final = 32
_PAUSE_SECONDS: Final = 0.5
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Takes what the system grants: the usual 1024 open files are fewer than the requests that may wait. The limit that
    then holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_FILES
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def most_connections(asked: int | None, files: int) -> int:
    """As many as were asked for, or as the files allow. Raises BadRequest if that is less."""
    reserve = min(max(_LEAST_RESERVE, files // _RESERVE_SHARE), files // 2)
    most = files - reserve
    if asked is not None and asked > most:
        raise BadRequest(
            f"max_connections is {asked}, but this process may open {files} files, of which {reserve} are for engines "
            f"and models. Allow it more (ulimit -n), or ask for {most} at most.",
            param="max_connections",
        )
    return asked or most


class Peer(Protocol):
    """A connection, as it is seen from here."""

    def has_unsent(self) -> bool:
        """Whether its client has yet to read the end of an answer."""

    def drop(self) -> None: ...


class Connections:
    """Those that are open. Use within one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_open = 0
        # In the order in which they fell idle, and in which their requests began.
        self._idle: dict[Peer, None] = {}
        self._receiving: dict[Peer, None] = {}

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def fall_idle(self, connection: Peer) -> None:
        self._forget(connection)
        self._idle[connection] = None

    def begin_request(self, connection: Peer) -> None:
        """Its head is here, and its body is yet to come."""
        self._forget(connection)
        self._receiving[connection] = None

    def begin_answer(self, connection: Peer) -> None:
        """All of the request is here: its connection makes room for no other."""
        self._forget(connection)

    def close(self, connection: Peer) -> None:
        self._forget(connection)
        self.num_open -= 1

    def make_room(self) -> bool:
        """Whether there is room for one more, if need be in place of one that carries no complete request."""
        if self.num_open < self.most:
            return True
        dropped = next((each for each in chain(self._idle, self._receiving) if not each.has_unsent()), None)
        if dropped is None:
            return False
        self._forget(dropped)
        dropped.drop()
        return True

    def _forget(self, connection: Peer) -> None:
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)


class Acceptor:
    """Takes connections from a listening socket. In place of asyncio's own, which accepts all that there are before it
    tells anybody, until there are no files left.
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
        """Something else has used up the files. The connection waits in the kernel, which would tell of it at once."""
        _log.warning("No connection can be accepted (%s). Allow more open files with ulimit -n.", error.strerror)
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(_PAUSE_SECONDS, self._listen)

    def _open(self, client: socket.socket) -> None:
        self._connections.num_open += 1
        client.setblocking(False)
        with suppress(OSError):
            # Tokens go out one by one: none may wait for the next.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, client)
        except OSError:
            # It was gone already.
            self._connections.num_open -= 1
            client.close()


def _refuse(client: socket.socket) -> None:
    """Tells it to come back. What it sent is not read, so the answer may get lost; the connection's end does not."""
    client.setblocking(False)
    with suppress(OSError):
        client.send(BUSY)
        client.shutdown(socket.SHUT_WR)
    client.close()


def _busy() -> bytes:
    error = Unavailable("All connections that this server may have are busy. Try again in a moment.")
    body = ErrorBody.of(error).model_dump_json().encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: {error.retry_after}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


BUSY: Final = _busy()

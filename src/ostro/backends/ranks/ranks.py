"""The other ranks of a model, as the first sees them: starts their processes, sends them what to do, watches them.

    rank 0     plans a step ──ring──> ranks 1, 2, …      all carry it out, with collectives in between
    watcher    <──sockets── what they report; the end of a socket is the end of its process

No tokens come back: rank 0 has all results itself.
"""

import logging
import selectors
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from ostro.backends.memory import Room
from ostro.backends.ranks.collective import TorchCollective, join_group
from ostro.backends.ranks.messages import Failed, Group, Here, Join, Loaded, Read, ToRank, encode, receive
from ostro.backends.ranks.ring import RingClosed, RingWriter
from ostro.backends.ranks.store_directory import StoreDirectory
from ostro.errors import ModelError, OstroError, Unavailable, from_process
from ostro.processes.environment import engine_environment
from ostro.processes.log_relay import Logged
from ostro.processes.spawn import spawn

_EXIT_SECONDS = 5.0
# A lost rank shows in a collective first, and a moment later in its socket.
_NOTICE_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Ranks:
    """Ranks 1 onwards of a group, as child processes. They end with this object or this process, whichever is first."""

    def __init__(self, ranks: int, *, backend: Group, devices: Sequence[int] = ()) -> None:
        """`devices` are the GPUs of all ranks, including this one; none on CPUs. Returns once all ranks have joined."""
        self.ranks, self.can_capture = ranks, backend == "nccl"
        self._watched = _Watched(ranks)
        self._finalizer = weakref.finalize(self, _end, self._watched)
        try:
            self._start()
            join = Join(ranks, backend, str(self._watched.directory.path / "store"), devices)
            self.send(join)
            self._from_each()
            self.collective: TorchCollective = join_group(join, rank=0)
            # From here on the watcher aborts it if a rank is lost. One that was lost earlier must be noticed here.
            self._watched.collective = self.collective
            if self._watched.lost.is_set():
                raise self.lost(ModelError("A rank ended."))
            self.collective.connect()
        except BaseException as error:
            # Joining fails if a rank is gone, but its error does not say so.
            lost = self.lost(error) if isinstance(error, RuntimeError) else error
            self.close()
            if lost is error:
                raise
            raise lost from error

    def _start(self) -> None:
        watched = self._watched
        for rank in range(1, self.ranks):
            process, sock = spawn(
                "ostro.backends.rank_process",
                str(watched.ring.file),
                str(rank),
                environment=engine_environment(),
                files=[watched.ring.file],
                own_group=False,
            )
            watched.processes.append(process)
            watched.sockets.append(sock)
        watched.ring.connect(watched.sockets)
        threading.Thread(target=_watch, args=(watched,), name="ranks", daemon=True).start()

    @property
    def failure(self) -> str | None:
        """Why the ranks can no longer compute; None while they can."""
        return self._watched.failure

    def send(self, message: ToRank) -> None:
        """Raises Unavailable if a rank is gone."""
        try:
            self._watched.ring.send(encode(message))
        except RingClosed as error:
            raise self.lost(error) from error

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Wraps whatever all ranks do together. An error inside leaves them out of step, so all of them end."""
        try:
            yield
        except BaseException as error:
            # A collective fails when a rank is gone, but its error does not say so.
            lost = self.lost(error) if isinstance(error, RuntimeError) else error
            self._give_up()
            if lost is error:
                raise
            raise lost from error

    def _give_up(self) -> None:
        watched = self._watched
        if watched.failure is None:
            watched.failure = "A step was interrupted, and the ranks no longer agree. Load the model again."
        watched.ring.close()
        for sock in watched.sockets:
            # Ends the rank, wherever it waits.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def agree_on(self, room: Room) -> Room:
        """As many pages and states as every rank has memory for, including this one. Raises the error of a rank that
        could not load its part.
        """
        others = [each for each in self._from_each() if isinstance(each, Loaded)]
        pages = min(room.pages, *(each.num_pages for each in others))
        return Room(pages, min(room.states, *(each.num_states for each in others)))

    def lost(self, error: Exception) -> Exception:
        """What to raise instead of an error that a lost rank caused; the error itself if none is lost."""
        self._watched.lost.wait(_NOTICE_SECONDS)
        if self._watched.failed is not None:
            return self._watched.failed.with_traceback(None)
        if self._watched.failure is not None:
            return Unavailable(self._watched.failure)
        return error

    def close(self) -> None:
        self._finalizer()

    def pids(self) -> list[int]:
        return [process.pid for process in self._watched.processes]

    def _from_each(self) -> list[Here | Loaded]:
        """The next answer of each rank."""
        answers = []
        for _ in range(1, self.ranks):
            answer = self._watched.answers.get()
            if answer is None:
                raise self.lost(ModelError("A rank ended."))
            answers.append(answer)
        return answers


@dataclass
class _Watched:
    """What the watcher and the ranks' owner share. The watcher must not keep its owner alive."""

    ranks: int
    ring: RingWriter = field(default_factory=RingWriter)
    directory: StoreDirectory = field(default_factory=StoreDirectory)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)
    answers: SimpleQueue[Here | Loaded | None] = field(default_factory=SimpleQueue)
    """Ranks' answers; None marks the end of a rank."""
    failed: OstroError | None = None
    """A rank's own error, if it ended with one."""
    failure: str | None = None
    lost: threading.Event = field(default_factory=threading.Event)
    closing: bool = False
    collective: TorchCollective | None = None


def _watch(watched: _Watched) -> None:
    with selectors.DefaultSelector() as selector:
        for index, sock in enumerate(watched.sockets):
            selector.register(sock, selectors.EVENT_READ, index)
        while True:
            for key, _ in selector.select():
                if not _take(watched, key.data):
                    return


def _take(watched: _Watched, index: int) -> bool:
    """Handles a rank's next message. False once a rank is gone: then all are lost."""
    match receive(watched.sockets[index]):
        case None:
            _lose(watched, index)
            return False
        case Read(position=position):
            watched.ring.acknowledge(index, position)
        case Logged() as logged:
            logged.write()
        case Failed(error=name, message=text, param=param):
            watched.failed = watched.failed or from_process(name, text, param=param)
        case answer:
            watched.answers.put(answer)
    return True


def _lose(watched: _Watched, index: int) -> None:
    if not watched.closing:
        with suppress(subprocess.TimeoutExpired):
            watched.processes[index].wait(_EXIT_SECONDS)
        ended = f"Rank {index + 1} of {watched.ranks} ended ({_how(watched.processes[index].returncode)})"
        if watched.failed is None:
            reason = f"{ended}, and the model cannot run without it. Load it again."
        else:
            reason = f"{ended}: {watched.failed.message}"
        watched.failure = watched.failure or reason
    # Set before collectives are aborted, so that nobody begins another.
    watched.ring.close()
    watched.lost.set()
    for _ in watched.processes:
        watched.answers.put(None)
    if watched.collective is not None:
        # Last, because it waits until no graph uses the group. Also when closing: otherwise freeing the group would
        # wait.
        watched.collective.abort()


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"


def _end(watched: _Watched) -> None:
    watched.closing = True
    for sock in watched.sockets:
        # Ends the rank, and wakes the watcher.
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for process in watched.processes:
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for sock in watched.sockets:
        sock.close()
    watched.ring.close()
    watched.ring.free()
    watched.directory.remove()

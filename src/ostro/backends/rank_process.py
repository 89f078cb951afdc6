"""A rank's process: loads its part of the model and carries out what the first rank plans. `backends.ranks.ranks`
starts it.

main thread      ring ──> model                    collectives with the other ranks in between
socket watcher   the first rank is gone when its socket ends: exit at once, whatever is running
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

import torch

from ostro.backends.backend import open_model
from ostro.backends.memory import Room
from ostro.backends.ranks.collective import TorchCollective, join_group
from ostro.backends.ranks.messages import (
    Begin,
    Failed,
    FromRank,
    Here,
    Join,
    Load,
    Loaded,
    Read,
    ToRank,
    decode_to_rank,
    frame,
)
from ostro.backends.ranks.ring import RingClosed, RingReader
from ostro.backends.torch.load import Part, set_threads
from ostro.errors import OstroError, Unavailable
from ostro.processes.log_relay import relay_logs
from ostro.weights import open_checkpoint

_LAST_WORDS_SECONDS = 5.0

_log = logging.getLogger("ostro.backends.rank_process")


class Upstream:
    """The connection to the first rank. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lock = sock, threading.Lock()

    def send(self, message: FromRank) -> None:
        with self._lock:
            try:
                self._socket.sendall(frame(message))
            except OSError:
                os._exit(0)


class Worker:
    def __init__(self, rank: int, upstream: Upstream) -> None:
        self._rank, self._upstream = rank, upstream
        self._join: Join | None = None
        self._collective: TorchCollective | None = None
        self._loaded: Callable[[Room], Part] | None = None
        self._part: Part | None = None

    def take(self, message: ToRank) -> None:
        match message:
            case Join():
                self._join = message
                if message.devices:
                    torch.cuda.set_device(message.devices[self._rank])
                self._upstream.send(Here())
                self._collective = join_group(message, self._rank)
                self._collective.connect()
            case Load():
                self._part = None
                room, self._loaded = self._load(message)
                self._upstream.send(Loaded(room.pages, room.states))
            case Begin(num_pages=pages, num_states=states):
                assert self._loaded is not None
                self._part = self._loaded(Room(pages, states))
            case step:
                assert self._part is not None
                with torch.inference_mode():
                    self._part.carry_out(step)

    def _load(self, load: Load) -> tuple[Room, Callable[[Room], Part]]:
        assert self._join is not None
        assert self._collective is not None
        set_threads(load.config.threads, self._join.ranks)
        opened = open_model(open_checkpoint(load.path, model_config=load.config.model_config), load.config)
        if opened.kind.name == "cuda":
            from ostro.backends.cuda.load import load_part
        else:
            from ostro.backends.torch.load import load_part
        return load_part(opened, self._rank, self._join, self._collective)


def leave_with(sock: socket.socket) -> None:
    """Ends this process as soon as the other end of the socket is closed, whatever it is doing."""

    def wait() -> None:
        hung_up = select.poll()
        hung_up.register(sock, 0)
        hung_up.poll()
        os._exit(0)

    threading.Thread(target=wait, name="hang-up", daemon=True).start()


def main() -> None:
    # The first rank handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    leave_with(sock)
    upstream = Upstream(sock)
    relay_logs(upstream.send)
    rank = int(sys.argv[3])
    ring, worker = RingReader(int(sys.argv[2]), sock), Worker(rank, upstream)
    try:
        while True:
            worker.take(decode_to_rank(ring.receive()))
            if (position := ring.due()) is not None:
                upstream.send(Read(position))
    except RingClosed:
        return
    except BaseException as error:  # noqa: BLE001  whatever it is, the others must not wait for this rank
        # If the first rank no longer reads, this one ends all the same.
        end = threading.Timer(_LAST_WORDS_SECONDS, os._exit, (1,))
        end.daemon = True
        end.start()
        upstream.send(_failed(rank, error))
        os._exit(1)


def _failed(rank: int, error: BaseException) -> Failed:
    if isinstance(error, OstroError):
        return Failed(type(error).__name__, error.message, error.param)
    _log.error("rank %d failed", rank, exc_info=error)
    reason = next(iter(str(error).splitlines()), "")
    # Unavailable, because it may be temporary: the first rank, too, is restarted after an unexpected error.
    return Failed(Unavailable.__name__, f"Rank {rank} failed ({type(error).__name__}: {reason}). The log has more.")


if __name__ == "__main__":
    main()
    # Skip interpreter shutdown, which waits for threads and tears down device libraries in no defined order.
    os._exit(0)

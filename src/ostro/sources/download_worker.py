"""The subprocess that downloads a model's files, its tokenizer and its adapters. The parent can cancel at any time by
killing it along with its children; bytes already downloaded are kept. Started by `ostro.server.models.files`.

socket <── JSON lines: log records and progress, then the paths of the files or the reason for the failure
       ──> nothing; closing it ends this process

After reporting the paths, it holds the files in the cache until it is stopped.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ostro.errors import ModelNotFound, OstroError
from ostro.processes.log_relay import Logged, relay_logs
from ostro.processes.spawn import leave
from ostro.sources.fetch import fetch_model
from ostro.sources.place import find_adapter
from ostro.sources.progress import ARRIVALS, Arrived
from ostro.sources.references import parse_model
from ostro.sources.store import ModelStore
from ostro.sources.tokenizer_files import fetch_tokenizer, naming_tokenizer

_ROUNDS = 3


class Order(msgspec.Struct, frozen=True):
    """What to download; the fields come from `EngineConfig`."""

    model: str | None
    tokenizer: str | None
    adapters: tuple[tuple[str, str], ...]


class Fetched(msgspec.Struct, frozen=True, tag=True):
    path: str
    name: str | None
    tokenizer: str | None
    adapters: tuple[tuple[str, str], ...]


class Progress(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int
    total: int | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    error: str
    message: str


Word = Logged | Progress | Fetched | Failed


class _Report:
    """The worker's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, word: Word) -> None:
        try:
            self._sock.sendall(msgspec.json.encode(word) + b"\n")
        except OSError:
            leave()


class _Progress(logging.Handler):
    def __init__(self, report: _Report) -> None:
        super().__init__(logging.DEBUG)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        [arrived] = record.args or ()
        assert isinstance(arrived, Arrived)
        self._report.send(Progress(arrived.num_bytes, arrived.total))


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[1]))
    order = msgspec.json.decode(sys.argv[2], type=Order)
    # Anything libraries print to stdout goes to stderr.
    os.dup2(2, 1)
    threading.Thread(target=_watch, args=[sock], name="watch", daemon=True).start()
    report = _Report(sock)
    relay_logs(report.send)
    arrivals = logging.getLogger(ARRIVALS)
    arrivals.setLevel(logging.DEBUG)
    arrivals.propagate = False
    arrivals.addHandler(_Progress(report))
    with ExitStack() as held:
        try:
            fetched = _fetch(order, held)
        except OstroError as error:
            report.send(Failed(type(error).__name__, error.message))
            return 1
        report.send(fetched)
        signal.pause()
    return 0


def _fetch(order: Order, held: ExitStack) -> Fetched:
    model = parse_model(order.model)
    path = _kept(lambda: model.fetch(progress=True), held)
    adapters = []
    for name, reference in order.adapters:

        def directory(reference: str = reference) -> Path:
            found = find_adapter(reference, order.model, path)
            return fetch_model(reference, progress=True) if found is None else found

        adapters.append((name, str(_kept(directory, held))))
    return Fetched(str(path), model.label, _tokenizer(order.tokenizer, held), tuple(adapters))


def _tokenizer(reference: str | None, held: ExitStack) -> str | None:
    if reference is None:
        return None
    with naming_tokenizer(reference):
        return str(_kept(lambda: fetch_tokenizer(reference, progress=True), held))


def _kept(fetch: Callable[[], Path], held: ExitStack) -> Path:
    """The path that `fetch` returns, protected from eviction until `held` is closed."""
    for last in (False,) * (_ROUNDS - 1) + (True,):
        path = fetch()
        try:
            held.enter_context(ModelStore().hold(path))
        except ModelNotFound:
            # Evicted between the fetch and the hold.
            if last:
                raise
        else:
            return path
    raise AssertionError("the last round returns or raises")


def _watch(sock: socket.socket) -> None:
    """The parent never writes to the socket, so a read returns only when the socket is closed."""
    sock.recv(1)
    leave()


if __name__ == "__main__":
    status = main()
    # Do not wait for threads that a library may have left running.
    sys.stderr.flush()
    os._exit(status)

"""The command's side of the load processes: starts them, distributes a level among them, stops them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import msgspec

from ostro.errors import OstroError
from ostro.measure.bench.jobs import (
    Broken,
    Finished,
    FromWorker,
    Go,
    Job,
    Level,
    Progress,
    Ready,
    RunJob,
    Stop,
    ToWorker,
)
from ostro.measure.bench.workload import Workload

_START_AHEAD = 0.05
_END_SECONDS = 10.0


class LoadFailed(OstroError):
    """A load process crashed: our own bug, or a problem with the machine."""


class LoadWorkers:
    def __init__(
        self, workers: list[subprocess.Popen[bytes]], messages: "SimpleQueue[tuple[int, FromWorker | None]]"
    ) -> None:
        self._workers = workers
        self._messages = messages

    def run(
        self,
        level: Level,
        workload: Workload,
        *,
        url: str,
        headers: Mapping[str, str],
        timeout: float,
        progress: Callable[[Progress], None],
    ) -> tuple[list[Finished], bool]:
        """Each process's results, and whether the level ran to completion: an interrupt stops it early."""
        clients = int(level.value) if level.kind == "concurrency" else len(self._workers)
        # A process without clients has nothing to do.
        workers = self._workers[:clients]
        number = len(workers)
        for which, worker in enumerate(workers):
            first, end = which * clients // number, (which + 1) * clients // number
            job = Job(
                url=url,
                headers=dict(headers),
                timeout=timeout,
                workload=workload,
                level=level,
                first=first,
                num_clients=end - first,
                stride=clients,
            )
            _send(worker, RunJob(job))
        with self._interrupts():
            return self._gather(workers, progress)

    def _gather(
        self, workers: Sequence[subprocess.Popen[bytes]], progress: Callable[[Progress], None]
    ) -> tuple[list[Finished], bool]:
        found: list[Finished] = []
        ready, whole = 0, True
        running = [0] * len(workers)
        while len(found) < len(workers):
            number, message = self._next()
            match message:
                case Ready():
                    ready += 1
                    if ready == len(workers):
                        _send_all(workers, Go(time.perf_counter() + _START_AHEAD))
                case Progress() as news:
                    running[number] = news.running
                    progress(msgspec.structs.replace(news, running=sum(running)))
                case Finished() as share:
                    found.append(share)
                case None:
                    if not whole:
                        raise KeyboardInterrupt
                    whole = False
                    _send_all(workers, Stop())
        return found, whole

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Turns interrupts into messages: an exception could strike while another message is received, and lose it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self._messages.put((-1, None)))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _next(self) -> tuple[int, FromWorker | None]:
        """A process's number and its message; None means an interrupt."""
        number, message = self._messages.get()
        if isinstance(message, Broken):
            raise LoadFailed(f"Load process {number} crashed: {message.words}")
        return number, message


@contextmanager
def load_workers(number: int) -> Iterator[LoadWorkers]:
    messages: SimpleQueue[tuple[int, FromWorker | None]] = SimpleQueue()
    workers: list[subprocess.Popen[bytes]] = []
    listeners: list[threading.Thread] = []
    try:
        for name in range(number):
            worker = subprocess.Popen(
                [sys.executable, "-m", "ostro.measure.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Interrupts go to the command alone, which tells the others.
                start_new_session=os.name == "posix",
            )
            workers.append(worker)
            listener = threading.Thread(target=_listen, args=(name, worker, messages), daemon=True)
            listener.start()
            listeners.append(listener)
        yield LoadWorkers(workers, messages)
    finally:
        for worker in workers:
            _end(worker)
        for listener in listeners:
            listener.join()
        for worker in workers:
            if worker.stdout is not None:
                worker.stdout.close()


def _listen(
    number: int, worker: subprocess.Popen[bytes], messages: "SimpleQueue[tuple[int, FromWorker | None]]"
) -> None:
    assert worker.stdout is not None
    decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
    for line in worker.stdout:
        messages.put((number, decoder.decode(line)))
    messages.put((number, Broken("it ended.")))


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.stdin is not None:
        with suppress(BrokenPipeError):
            worker.stdin.close()
    try:
        worker.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def _send_all(workers: Sequence[subprocess.Popen[bytes]], message: ToWorker) -> None:
    for worker in workers:
        _send(worker, message)


def _send(worker: subprocess.Popen[bytes], message: ToWorker) -> None:
    assert worker.stdin is not None
    # If it crashed, its last message is already on the way.
    with suppress(BrokenPipeError):
        worker.stdin.write(msgspec.json.encode(message) + b"\n")
        worker.stdin.flush()

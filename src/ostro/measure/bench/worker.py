"""A load process: `python -m ostro.measure.bench.worker`, controlled through its standard input.

It exits when its input is closed, so it never outlives the command that started it. That command handles interrupts.
"""

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import msgspec

from ostro.measure.bench.drive import Drive
from ostro.measure.bench.jobs import Broken, FromWorker, Go, Ready, RunJob, Stop, ToWorker

_MOST_FILES = 65536
_END_SECONDS = 5.0


class _Worker:
    def __init__(self) -> None:
        self._messages: asyncio.Queue[ToWorker | None] = asyncio.Queue()
        self._drive: Drive | None = None
        self._stopped = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        while (message := await self._messages.get()) is not None:
            if isinstance(message, RunJob):
                await self._level(message)

    async def _level(self, message: RunJob) -> None:
        drive = self._drive = Drive(message.job, _send)
        if self._stopped:
            drive.stop()
        try:
            await drive.prepare()
            _send(Ready())
            while not isinstance(told := await self._messages.get(), Go):
                if told is None:
                    return
            _send(await drive.run(told.at))
        finally:
            self._drive = None
            await drive.close()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for message in _received():
            loop.call_soon_threadsafe(self._take, message)
        loop.call_soon_threadsafe(self._take, None)
        # Exit whatever it is doing: nobody is left to report to.
        time.sleep(_END_SECONDS)
        os._exit(1)

    def _take(self, message: ToWorker | None) -> None:
        if isinstance(message, RunJob):
            self._stopped = False
        elif not isinstance(message, Go):
            # May arrive before the level's work has begun.
            self._stopped = True
            if self._drive is not None:
                self._drive.stop()
        if not isinstance(message, Stop):
            self._messages.put_nowait(message)


def _received() -> Iterator[ToWorker]:
    """Reads without Python's buffers: a thread blocked in one would delay the process's exit."""
    decoder: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
    pieces: list[bytes] = []
    while data := os.read(0, 1 << 20):
        first, *others = data.split(b"\n")
        pieces.append(first)
        for line in others:
            yield decoder.decode(b"".join(pieces))
            pieces = [line]


def _send(message: FromWorker) -> None:
    data = msgspec.json.encode(message) + b"\n"
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _more_files() -> None:
    """Raises the limit on open files: each connection is one."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _more_files()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_Worker().run())
    except BrokenPipeError:
        sys.exit(1)
    except Exception:  # noqa: BLE001 - reported to the command, which shows it
        _send(Broken(traceback.format_exc()))
        sys.exit(1)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop available."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()

"""A terminal with a process in it, for tests: what is typed there, what is shown, and signals by the keyboard."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from warm_start import WarmProcess, warm_start_in_terminal

OSTRO = (sys.executable, "-m", "ostro")
PATIENCE = 90.0
# How long somebody looks at a prompt before pressing Ctrl-C again.
_SECOND_THOUGHTS = 5.0
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
# The terminal becomes the process's own, so that Ctrl-C typed there is a signal to it.
_IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass
class Screen:
    process: subprocess.Popen[bytes] | WarmProcess
    keyboard: int
    shown: str = ""
    read_up_to: int = field(default=0)

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def resize(self, columns: int) -> None:
        _resize(self.keyboard, columns)

    def until(self, text: str) -> str:
        """Waits for text after what was read so far; returns everything up to it."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown[self.read_up_to :]:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
            assert self._read() or self.process.poll() is None, f"no {text!r} in {self.shown!r}, and it has ended"
        start = self.read_up_to
        self.read_up_to = self.shown.index(text, start) + len(text)
        return self.shown[start : self.read_up_to]

    def interrupt_until(self, text: str) -> str:
        """Presses Ctrl-C, and again where nothing comes of it, as people do: Python's `input` looks for signals, then
        waits for keys, and what arrives in between is kept until the next key or signal.
        """
        for _ in range(int(PATIENCE / _SECOND_THOUGHTS)):
            self.type(CTRL_C)
            deadline = time.monotonic() + _SECOND_THOUGHTS
            while text not in self.shown[self.read_up_to :] and time.monotonic() < deadline:
                self._read()
            if text in self.shown[self.read_up_to :]:
                break
        return self.until(text)

    def end(self) -> int:
        """The exit status of a process that ends by itself."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on: {self.shown!r}"
            self._read()
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        """Reads what there is; returns whether there was anything."""
        if not select.select([self.keyboard], [], [], 0.1)[0]:
            return False
        try:
            data = os.read(self.keyboard, 65536)
        except OSError:
            # What Linux says where the other side has been closed.
            assert self.process.wait(PATIENCE) is not None
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(
    *args: str,
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    columns: int = 80,
) -> Iterator[Screen]:
    """`ostro`, or another command, with these arguments, in a terminal of its own, without colour unless `env` has an
    empty NO_COLOR.
    """
    keyboard, screen = pty.openpty()
    _resize(screen, columns)
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", **(env or {})}
    process: subprocess.Popen[bytes] | WarmProcess
    try:
        if command is None:
            process = warm_start_in_terminal(args, terminal=screen, environment=environment, cwd=cwd or Path.cwd())
        else:
            process = subprocess.Popen(
                [sys.executable, "-c", _IN_TERMINAL, *command, *args],
                stdin=screen,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
                cwd=cwd,
                env=environment,
            )
    finally:
        os.close(screen)
    try:
        yield Screen(process, keyboard)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(keyboard)


def _resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

"""`ostro` commands that start at once: forked from a process that has imported them, which takes most of a second.

What is started is a process like any other, with arguments, environment, directory, output and signals of its own. Only
Python's own variables (PYTHONPATH and the like) came too early for it.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class WarmProcess:
    """What tests use of `subprocess.Popen`, for a process that is not their child: its parent tells how it ended."""

    def __init__(self, pid: int, ended: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            told = self._ended.read()
            self._ended.close()
            self.returncode = int(told)
        return self.returncode


def warm_start(command: Sequence[str], *, output: IO[bytes], environment: Mapping[str, str], cwd: Path) -> WarmProcess:
    """`ostro` with these words; both of its outputs go to the one file."""
    parent = _parent()
    reading, writing = os.pipe()
    order = json.dumps({"command": list(command), "environment": dict(environment), "cwd": str(cwd)})
    try:
        socket.send_fds(parent, [order.encode() + b"\n"], [output.fileno(), writing])
    finally:
        os.close(writing)
    return WarmProcess(int(_line(parent)), os.fdopen(reading, "rb"))


@functools.cache
def _parent() -> socket.socket:
    """Our end of the conversation with it. It ends when that is closed, if only because we have died."""
    ours, its = socket.socketpair()
    line = [sys.executable, __file__, str(its.fileno())]
    with its:
        parent = subprocess.Popen(line, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        parent.wait()

    atexit.register(end)
    return ours


def _line(conversation: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        more = conversation.recv(1 << 16)
        if not more:
            raise ConnectionError("the process that starts others has ended")
        line += more
    return line.decode()


def _next_command(tests: socket.socket) -> list[str] | None:
    """Returns a command in each process that is to run one, and nothing in this one, once the tests are over."""
    while True:
        start, descriptors, _, _ = socket.recv_fds(tests, 1 << 16, 2)
        if not start:
            return None
        order = json.loads(start if start.endswith(b"\n") else start.decode() + _line(tests))
        output, ended = descriptors
        if os.fork() == 0:
            _watch_over_child(tests, ended)
            tests.close()
            os.close(ended)
            _become(output, order["environment"], order["cwd"])
            return list(order["command"])
        os.close(output)
        os.close(ended)


def _watch_over_child(tests: socket.socket, ended: int) -> None:
    """Returns in the child; the process itself says who that is, waits for its end, and says what that was."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        tests.sendall(b"%d\n" % child)
        tests.close()
        _, status = os.waitpid(child, 0)
        os.write(ended, b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)


def _become(output: int, environment: Mapping[str, str], cwd: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


if __name__ == "__main__":
    import ostro.cli.serve
    import ostro.server.lifecycle  # noqa: F401
    from ostro.cli import main

    # Ctrl-C is for whoever runs the tests; nobody asks how the processes in between have ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    found = _next_command(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(None if found is None else main(found))

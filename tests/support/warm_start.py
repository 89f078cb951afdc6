"""`ostro` commands and programs that start at once: forked from a process that has imported what they need, which takes
more than a second. So are the engines that these commands start: `warm_engines`.

What is started is a process like any other, with arguments, environment, directory, files and signals of its own. Only
Python's own variables (PYTHONPATH and the like) came too early for it, and what tests say of imports and of starting
itself takes a process that starts cold.
"""

import atexit
import fcntl
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO


class WarmProcess:
    """The part of `subprocess.Popen` that tests use, for a process whose parent reports how it ended."""

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


_one_at_a_time = threading.Lock()


def warm_start(command: Sequence[str], *, output: IO[bytes], environment: Mapping[str, str], cwd: Path) -> WarmProcess:
    """`ostro` with these words; both of its outputs go to the one file."""
    with open(os.devnull, "rb") as nothing:
        return _start(None, command, [nothing.fileno(), output.fileno(), output.fileno()], environment, cwd)


def warm_start_in_terminal(
    command: Sequence[str], *, terminal: int, environment: Mapping[str, str], cwd: Path
) -> WarmProcess:
    """`ostro` with these words; the terminal becomes its own, so that Ctrl-C typed there is a signal to it."""
    return _start(None, command, [terminal] * 3, environment, cwd, in_terminal=True)


def warm_run(
    words: Sequence[str],
    *,
    program: str | None = None,
    cwd: Path | str = ".",
    environment: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Runs `ostro` with these words to its end, or this Python program with them as its arguments."""
    outputs = [os.pipe() for _ in range(2)]
    with TemporaryFile() as stdin, ThreadPoolExecutor(2) as readers:
        stdin.write(input.encode())
        stdin.seek(0)
        told = [readers.submit(_read_to_the_end, reading) for reading, _ in outputs]
        try:
            ends = (stdin.fileno(), *(writing for _, writing in outputs))
            surroundings = os.environ if environment is None else environment
            process = _start(program, words, ends, surroundings, Path(cwd).absolute())
        finally:
            for _, writing in outputs:
                os.close(writing)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        stdout, stderr = (each.result().decode() for each in told)
    return subprocess.CompletedProcess([*words], status, stdout, stderr)


def _read_to_the_end(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _start(
    program: str | None,
    words: Sequence[str],
    files: Sequence[int],
    environment: Mapping[str, str],
    cwd: Path,
    *,
    in_terminal: bool = False,
) -> WarmProcess:
    reading, writing = os.pipe()
    order = _Order(program, list(words), dict(environment), str(cwd), in_terminal)
    with _one_at_a_time:
        parent = _parent()
        socket.send_fds(parent, [b"\n"], [*files, writing])
        os.close(writing)
        parent.sendall(json.dumps(asdict(order)).encode() + b"\n")
        pid = int(_line(parent))
    return WarmProcess(pid, os.fdopen(reading, "rb"))


@functools.cache
def _parent() -> socket.socket:
    """Our end of the conversation with it. It ends when that is closed, if only because we have died."""
    ours, its = socket.socketpair()
    line = [sys.executable, __file__, str(its.fileno())]
    # A process that is forked has one thread, and numpy would start more.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with its:
        parent = subprocess.Popen(
            line, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
        )

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


@dataclass(frozen=True)
class _Order:
    program: str | None
    words: list[str]
    environment: dict[str, str]
    cwd: str
    in_terminal: bool


def _next_order(tests: socket.socket) -> _Order | None:
    """Returns an order in each process that is to carry one out, and nothing in this one, once the tests are over."""
    while True:
        start, descriptors, _, _ = socket.recv_fds(tests, 1, 4)
        if not start:
            return None
        order = _Order(**json.loads(_line(tests)))
        *files, ended = descriptors
        if os.fork() == 0:
            _watch_over_child(tests, ended)
            tests.close()
            os.close(ended)
            _become(files, order)
            return order
        for descriptor in descriptors:
            os.close(descriptor)


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


def _become(files: Sequence[int], order: _Order) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, given in enumerate(files):
        os.dup2(given, standard)
        os.close(given)
    if order.in_terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.cwd)


def _carry_out(order: _Order) -> int:
    if order.program is None:
        start_engines_warm()
        return main(order.words)
    sys.argv = ["-c", *order.words]
    exec(order.program, {"__name__": "__main__"})
    return 0


def _forget(package: str) -> None:
    """Unloads a package, so that its next import runs it again with its dependencies in memory."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


if __name__ == "__main__":
    import huggingface_hub.hf_api  # noqa: F401
    from warm_engines import prepare_for_engines, start_engines_warm

    import ostro.backends.planning
    import ostro.cli.serve
    import ostro.server.lifecycle
    import ostro.weights  # noqa: F401
    from ostro.cli import COMMANDS, main, module_of

    # The last ones are imported by a server that starts.
    late = ("encodings.idna", "pydantic.v1", "uvicorn.lifespan.off", "uvicorn.lifespan.on", "uvloop")
    for name in (*map(module_of, COMMANDS), *late):
        importlib.import_module(name)
    # It reads its settings from the environment when it is imported.
    _forget("huggingface_hub")
    prepare_for_engines()
    # Ctrl-C is for the test run itself; nobody asks how the processes in between have ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    found = _next_order(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(None if found is None else _carry_out(found))

"""Engines that start at once: forked from a process that has imported what they need, which takes half a second.

command ──order──> starter ──fork──> helper, which ends ──fork──> engine, which the command adopts

The command runs threads by the time it needs an engine, and cannot be forked then: its starter is forked before. The
engine is the command's child all the same, as one started by `ostro.processes.spawn` is.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn
from unittest import mock

from ostro.engine_process import handle

_MODULE = "ostro.engine_process.process"
_PR_SET_CHILD_SUBREAPER = 36


class Engine:
    """The part of `subprocess.Popen` that an `EngineHandle` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def start_engines_warm() -> None:
    """Starts engines warm from now on, in a process that still has one thread and has called `prepare_for_engines`."""
    ours, its = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _take_orders(its)
    its.close()
    mock.patch.object(handle, "spawn", _Starter(ours).spawn).start()


@contextmanager
def warm_engines() -> Iterator[None]:
    """Starts engines warm while the block runs, in a process that may have threads."""
    with mock.patch.object(handle, "spawn", _own_starter().spawn):
        yield


class _Starter:
    """Our side of the conversation with the starter."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = connection.makefile("rb")
        self._one_at_a_time = threading.Lock()

    def spawn(self, module: str, *, environment: Mapping[str, str]) -> tuple[Engine, socket.socket]:
        """Stands in for `ostro.processes.spawn.spawn`."""
        assert module == _MODULE
        ours, theirs = socket.socketpair()
        with theirs, self._one_at_a_time:
            _adopt_orphans(True)
            socket.send_fds(self._connection, [b"\n"], [1, 2, theirs.fileno()])
            self._connection.sendall(json.dumps(dict(environment)).encode() + b"\n")
            pid = int(self._answers.readline())
            _adopt_orphans(False)
        return Engine(pid), ours


@functools.cache
def _own_starter() -> _Starter:
    """It ends when our end of the conversation is closed, if only because we have died."""
    ours, its = socket.socketpair()
    # A process that is forked has one thread, and numpy would start more.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with its:
        process = subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment
        )
    starter = _Starter(ours)

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        process.wait()

    atexit.register(end)
    return starter


def prepare_for_engines() -> None:
    """Imports what engines need."""
    for name in (_MODULE, "ostro.backends.loading"):
        importlib.import_module(name)
    # It is to be run as a program.
    del sys.modules[_MODULE]
    # What has been imported stays: no process need look at it again when it collects garbage.
    gc.freeze()


def _adopt_orphans(adopt: bool) -> None:
    """Sets whether orphaned descendants become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _take_orders(command: socket.socket) -> NoReturn:
    """Starts engines for as long as the command lives."""
    # Out of reach of what is typed at the command's terminal, and of those who wait for the end of its output.
    os.setsid()
    _redirect([nothing := os.open(os.devnull, os.O_RDWR)] * 3)
    os.close(nothing)
    orders = command.makefile("rb")
    while True:
        start, files, _, _ = socket.recv_fds(command, 1, 3)
        if not start:
            os._exit(0)
        environment = json.loads(orders.readline())
        waiting, adopted = os.pipe()
        helper = os.fork()
        if helper == 0:
            os.close(adopted)
            _start_engine(command, environment, files, waiting)
        os.waitpid(helper, 0)
        # What an engine asks the kernel to do when its parent ends must not be done when the helper does.
        for descriptor in (*files, waiting, adopted):
            os.close(descriptor)
        command.sendall(b"\n")


def _start_engine(command: socket.socket, environment: dict[str, str], files: Sequence[int], waiting: int) -> NoReturn:
    """From the helper. The engine begins once it is told, or left alone."""
    engine = os.fork()
    if engine:
        os.setpgid(engine, engine)
        command.sendall(b"%d" % engine)
        os._exit(0)
    os.setpgid(0, 0)
    command.close()
    os.read(waiting, 1)
    os.close(waiting)
    stdout, stderr, to_command = files
    _redirect([0, stdout, stderr])
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [_MODULE, str(to_command)]
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
    # It does not return.
    os._exit(0)


def _redirect(files: Sequence[int]) -> None:
    for standard, file in enumerate(files):
        os.dup2(file, standard)


if __name__ == "__main__":
    prepare_for_engines()
    _take_orders(socket.socket(fileno=int(sys.argv[1])))

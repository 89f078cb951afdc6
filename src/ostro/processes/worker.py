"""A child process for work that must not run in this one, with limits on CPU time and memory. Knows no messages.

ask ──> Worker ──socket──> worker_process.serve ──> reply

A process that hits a limit is replaced when the next message comes; one that serves in forks replaces the fork itself.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ostro.processes.environment import template_environment
from ostro.processes.spawn import spawn
from ostro.processes.worker_process import LENGTH, LIMITS, RAN_OUT_OF_TIME

_CHUNK = 1 << 18


class WorkerError(Exception):
    """Why there is no reply."""


class WorkerClosed(WorkerError):
    """The worker was closed before it answered."""


class WorkerNotStarted(WorkerError):
    """There is no process, and none could be started."""


class WorkerEnded(WorkerError):
    """The process or its fork ended in the middle of an exchange; `status` is a signal's number, negative, or its exit
    status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with status {status}")
        self.status = status

    @property
    def ran_out_of_time(self) -> bool:
        return self.status == -signal.SIGPROF


class Worker:
    """Use either its blocking methods, from any thread, or its asynchronous one, within one event loop."""

    def __init__(self, module: str, setup: bytes, *, seconds: float, memory: int) -> None:
        """`module` is run as a program and calls `serve`, whose `begin` gets the setup. `seconds` is the CPU time for
        each message; `memory` is the address space in bytes, including the interpreter's.
        """
        self._module, self._head = module, _frame(LIMITS.pack(seconds, memory)) + _frame(setup)
        self._process: _Process | None = None
        self._closed = False
        # So that no process is started while another thread closes the worker.
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Id of the process, while there is one."""
        return None if self._process is None else self._process.popen.pid

    def start(self) -> None:
        """Starts the process before the first message, which tries again if this fails; returns at once."""
        with suppress(WorkerError):
            self._running()

    def close(self) -> None:
        """Ends the process, as garbage collection of the worker does. Exchanges in progress and later ones end with
        WorkerClosed.
        """
        with self._starting:
            self._closed = True
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        if not (self._lock.locked() or self._turn.locked()):
            # Otherwise the exchange in progress does so, once it has stopped reading.
            process.end()

    def ask(self, message: bytes, longest: int) -> bytes:
        """The reply, at most `longest` bytes. Raises WorkerError if there is none."""
        with self._lock, self._exchange() as process:
            process.socket.setblocking(True)
            process.socket.sendall(process.with_head(message))
            return process.read(longest)

    async def ask_async(self, message: bytes, longest: int) -> bytes:
        """Like `ask`, without blocking the event loop. If it is cancelled, the reply is still read, and dropped: the
        process, which others share, lives on.
        """
        await self._turn.acquire()
        exchange = asyncio.create_task(self._ask_in_turn(message, longest))
        exchange.add_done_callback(self._end_turn)
        # Unlike an await, this leaves the exchange alone when it is cancelled.
        await asyncio.wait((exchange,))
        return exchange.result()

    async def _ask_in_turn(self, message: bytes, longest: int) -> bytes:
        with self._exchange() as process:
            process.socket.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(process.socket, process.with_head(message))
            return await process.read_async(longest)

    def _end_turn(self, exchange: asyncio.Task[bytes]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            # Retrieved, so that asyncio does not log it as lost when nobody waits any more.
            exchange.exception()

    @contextmanager
    def _exchange(self) -> "Iterator[_Process]":
        """The process, for one message and its reply. If they are not exchanged in full, nobody uses it again."""
        process = self._running()
        try:
            yield process
        except _ForkRanOutOfTime as error:
            raise WorkerEnded(-signal.SIGPROF) from error
        except BaseException as error:
            self._process = None
            status = process.end()
            if isinstance(error, (OSError, EOFError)):
                raise WorkerClosed if self._closed else WorkerEnded(status) from error
            raise

    def _running(self) -> "_Process":
        with self._starting:
            if self._closed:
                raise WorkerClosed
            if self._process is not None and self._process.popen.poll() is not None:
                # It was killed between two messages, which is not the next one's fault.
                self._process.end()
                self._process = None
            if self._process is None:
                self._process = _Process(self._module, self._head)
            return self._process


class _Process:
    def __init__(self, module: str, head: bytes) -> None:
        self._head = head
        environment = {**template_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self.popen, self.socket = spawn(module, environment=environment, options=["-P"])
        except OSError as error:
            raise WorkerNotStarted(f"no process could be started ({error.strerror})") from error
        self._finalizer = weakref.finalize(self, _end, self.popen, self.socket)

    def kill(self) -> None:
        """Ends it and wakes whoever waits for its reply. Leaves the socket open: an event loop is never told that a
        socket it waits for was closed here.
        """
        _kill(self.popen, self.socket)

    def end(self) -> int:
        """Ends it and returns its exit status: the negative number of the signal, if one killed it earlier."""
        self._finalizer()
        return self.popen.returncode

    def with_head(self, message: bytes) -> bytes:
        """The bytes to send for this message: the limits and the setup precede the first one."""
        head, self._head = self._head, b""
        return head + _frame(message)

    def read(self, longest: int) -> bytes:
        """Its next message; raises EOFError if it ends before that is complete, or announces a longer one."""
        parts, missing = [], LENGTH.size
        header = self.socket.recv(missing, socket.MSG_WAITALL)
        missing = _length(header, longest)
        while missing:
            parts.append(self.socket.recv(min(missing, _CHUNK)))
            missing -= _received(parts[-1])
        return b"".join(parts)

    async def read_async(self, longest: int) -> bytes:
        loop = asyncio.get_running_loop()
        header = b""
        while len(header) < LENGTH.size:
            part = await loop.sock_recv(self.socket, LENGTH.size - len(header))
            _received(part)
            header += part
        parts, missing = [], _length(header, longest)
        while missing:
            parts.append(await loop.sock_recv(self.socket, min(missing, _CHUNK)))
            missing -= _received(parts[-1])
        return b"".join(parts)


class _ForkRanOutOfTime(Exception):
    """The process itself lives on."""


def _length(header: bytes, longest: int) -> int:
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    if length == RAN_OUT_OF_TIME:
        raise _ForkRanOutOfTime
    if length > longest:
        # Whatever this is, our process did not send it.
        raise EOFError
    return int(length)


def _received(part: bytes) -> int:
    if not part:
        raise EOFError
    return len(part)


def _end(popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
    _kill(popen, connection)
    connection.close()


def _kill(popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    popen.kill()
    popen.wait()


def _frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message

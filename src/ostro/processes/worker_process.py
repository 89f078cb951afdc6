"""The child's side of `worker`: answers messages one at a time, under limits that the kernel enforces.

Nothing that an answer runs can evade them: the process is refused memory beyond the limit, and killed when its CPU time
is up. On systems that do not bound a process's address space, such as macOS, only the time limit holds.

On the socket a message is its length, four bytes, then its content. The first two are the limits and the setup. A
length of RAN_OUT_OF_TIME, without content, says that there is no reply and that the next message will have one.
"""

import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from ostro.processes.spawn import die_with_parent

LENGTH = struct.Struct("<I")
LIMITS = struct.Struct("<dQ")
"""Seconds of CPU time for each message, and bytes of address space."""
RAN_OUT_OF_TIME = 0xFFFFFFFF


def serve(descriptor: int, begin: Callable[[bytes], Callable[[bytes], bytes]], *, in_forks: bool = False) -> None:
    """Answers until the other end of the socket is closed. `begin` gets the setup and returns the answering function.

    `in_forks` is for messages that often run out of time: each time, the next fork starts within a millisecond, with
    all that `begin` has built.
    """
    with socket.socket(fileno=descriptor) as connection:
        limits, setup = _read(connection), _read(connection)
        if limits is None or setup is None:
            return
        seconds, memory = LIMITS.unpack(limits)
        _limit(memory)
        answer = begin(setup)
        if in_forks:
            _answer_in_forks(connection, answer, seconds)
        else:
            _answer(connection, answer, seconds)


def _answer_in_forks(connection: socket.socket, answer: Callable[[bytes], bytes], seconds: float) -> None:
    # Otherwise the fork's first garbage collection would copy every shared page.
    gc.freeze()
    while (status := _status_of_fork(lambda: _answer(connection, answer, seconds))) == -signal.SIGPROF:
        connection.sendall(LENGTH.pack(RAN_OUT_OF_TIME))
    if status < 0:
        # The parent learns from this process's status what ended the fork.
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _status_of_fork(run: Callable[[], None]) -> int:
    """Runs it in a fork of this process; returns the fork's exit status as `subprocess` gives it."""
    try:
        pid = os.fork()
    except OSError:
        # The machine's fault and not the message's: report it as if somebody had killed the process.
        return -signal.SIGTERM
    if pid == 0:
        die_with_parent()
        run()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _answer(connection: socket.socket, answer: Callable[[bytes], bytes], seconds: float) -> None:
    while (message := _read(connection)) is not None:
        # Nobody catches its signal, so it ends the process whatever that is doing.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = answer(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(LENGTH.pack(len(reply)))
        connection.sendall(reply)


def _limit(memory: int) -> None:
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        _, hard = resource.getrlimit(kind)
        # Refused by systems that know the limit but do not enforce it.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(connection: socket.socket) -> bytes | None:
    """The next message; None once the other end is closed. Reads no further, so that a fork finds the rest."""
    header = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    message = connection.recv(length, socket.MSG_WAITALL)
    return message if len(message) == length else None

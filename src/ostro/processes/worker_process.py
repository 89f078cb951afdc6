"""The child's side of `worker`: answers messages one at a time, under limits that the kernel enforces.

Nothing that an answer runs gets around them: memory beyond the limit is refused to the process, and CPU time beyond it
ends the process. On systems that do not bound a process's address space, such as macOS, only the limit on time holds.

On the socket a message is its length, four bytes, then its content. The first two are the limits and the setup.
"""

import resource
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

LENGTH = struct.Struct("<I")
LIMITS = struct.Struct("<dQ")
"""Seconds of CPU time for each message, and bytes of address space."""


def serve(descriptor: int, begin: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Answers until the other end of the socket is closed. `begin` is given the setup, and returns what answers."""
    connection = socket.socket(fileno=descriptor)
    with connection, connection.makefile("rb") as stream:
        limits, setup = _read(stream), _read(stream)
        if limits is None or setup is None:
            return
        seconds, memory = LIMITS.unpack(limits)
        _limit(memory)
        answer = begin(setup)
        while (message := _read(stream)) is not None:
            # Its signal ends the process, whatever that is busy with: nobody catches it.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = answer(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(LENGTH.pack(len(reply)))
            connection.sendall(reply)


def _limit(memory: int) -> None:
    for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        _, hard = resource.getrlimit(kind)
        # Refused by systems that know the limit and do not keep it.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None once the other end is closed."""
    header = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(header)) if len(header) == LENGTH.size else None

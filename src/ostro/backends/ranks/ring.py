"""Bytes from one process to several others on the machine, through shared memory.

    memory   [ message 7 | message 8 | free        | message 6 ]        written once for all readers
    sockets    offset and length of each message, 16 bytes                 wakes a reader, and orders memory accesses

A reader reports how far it has read after every quarter of the memory; the writer waits only if it would overwrite what
somebody has not read. A message too long for the memory follows on the sockets.
"""

import mmap
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Sequence
from typing import Final

_DOORBELL: Final = struct.Struct("<QQ")
_INLINE: Final = (1 << 64) - 1
CAPACITY: Final = 16 << 20
"""Bytes of shared memory; only those that are written take space."""


class RingClosed(Exception):
    """The other side is gone."""


class RingWriter:
    """Use from one thread; `acknowledge` and `close` from any."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._file = _memory_file(capacity)
        self._memory = mmap.mmap(self._file, capacity)
        self._capacity = capacity
        self._sockets: list[socket.socket] = []
        self._written = 0
        self._read: list[int] = []
        self._changed = threading.Condition()
        self._closed = False

    @property
    def file(self) -> int:
        """The descriptor that readers inherit."""
        return self._file

    def connect(self, sockets: Sequence[socket.socket]) -> None:
        """Sets the readers' sockets. Call it before the first message."""
        self._sockets, self._read = list(sockets), [0] * len(sockets)

    def send(self, data: bytes) -> None:
        """Raises RingClosed if a reader is gone."""
        if len(data) > self._capacity // 4:
            self._ring(_DOORBELL.pack(_INLINE, len(data)) + data)
            return
        offset = self._written % self._capacity
        if offset + len(data) > self._capacity:
            # A message is never split: what is left at the end stays unused.
            self._written += self._capacity - offset
            offset = 0
        self._wait_for_room(self._written + len(data) - self._capacity)
        self._memory[offset : offset + len(data)] = data
        self._ring(_DOORBELL.pack(self._written, len(data)))
        self._written += len(data)

    def acknowledge(self, reader: int, position: int) -> None:
        """The reader has read all before `position`."""
        with self._changed:
            self._read[reader] = position
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes a writer that waits for room: RingClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self) -> None:
        """Gives the memory back. Nothing may be sent any more."""
        self._memory.close()
        os.close(self._file)

    def _wait_for_room(self, oldest: int) -> None:
        """Waits until all readers have read everything before `oldest`."""
        if min(self._read) >= oldest:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._closed or min(self._read) >= oldest)

    def _ring(self, doorbell: bytes) -> None:
        if self._closed:
            raise RingClosed
        try:
            for each in self._sockets:
                each.sendall(doorbell)
        except OSError as error:
            raise RingClosed from error


class RingReader:
    def __init__(self, file: int, sock: socket.socket) -> None:
        self._capacity = os.fstat(file).st_size
        self._memory = mmap.mmap(file, self._capacity, prot=mmap.PROT_READ)
        self._socket = sock
        self._reported = 0
        self.position = 0
        """Everything before this position was read."""

    def receive(self) -> bytes:
        """The next message; waits for it. Raises RingClosed once the writer is gone."""
        position, length = _DOORBELL.unpack(self._exactly(_DOORBELL.size))
        if position == _INLINE:
            return self._exactly(length)
        offset = position % self._capacity
        data = self._memory[offset : offset + length]
        self.position = position + length
        return data

    def due(self) -> int | None:
        """The position to acknowledge now; None if none is due."""
        if self.position - self._reported < self._capacity // 4:
            return None
        self._reported = self.position
        return self.position

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                part = self._socket.recv(min(size, 1 << 20))
            except OSError as error:
                raise RingClosed from error
            if not part:
                raise RingClosed
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _memory_file(size: int) -> int:
    """An unnamed file that is never written to disk, where the system supports that."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("ostro-ring")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.ftruncate(file, size)
    return file

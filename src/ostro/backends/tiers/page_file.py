"""Pages in a file: records of one size, each with a checksum. Knows no engine and no tensors, and trusts no byte.

    header     magic, what the pages belong to, bytes of a page; its own checksum
    record 0   digest, order, their checksum, checksum of all | a page's bytes
    record 1   ...

A record that is damaged, truncated, or of another page counts as missing: `read` returns False, and raises nothing. A
file of another model or format, or one that others can write, is not used at all.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ostro.system.file_trust import why_untrusted

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"ostro pages 2\n\0\0"
# CRC-32, as in file systems: cryptographic digests take longer than reading, and do not stop a forger who can write the
# file.
_CHECKSUM = Struct("<I")
# Magic, identity, page bytes; then a checksum of these.
_HEADER = Struct("<16s32sQ")
_HEADER_BYTES = 4096
# Digest, order; then a checksum of these, and one of these and of the page.
_DIGEST_BYTES = 32
_RECORD = Struct(f"<{_DIGEST_BYTES}sQ")
_RECORD_BYTES = 128


class PageFileUnusable(Exception):
    """Why there can be no such file here, as a sentence without its full stop."""


class Found(NamedTuple):
    order: int
    digest: bytes
    record: int


class PageFile:
    """Takes over an open file, and uses up to `limit` bytes of it. Call `prepare`, or check `is_ours`, first."""

    def __init__(self, descriptor: int, *, identity: bytes, page_bytes: int, limit: int) -> None:
        self._descriptor, self.page_bytes = descriptor, page_bytes
        self.num_records = pages_within(limit, page_bytes)
        header = _HEADER.pack(_MAGIC, identity, page_bytes)
        self._header = header + _sum_of(header)

    def is_ours(self) -> bool:
        """Whether the file holds pages of this identity and size."""
        return os.pread(self._descriptor, len(self._header), 0) == self._header

    def prepare(self) -> None:
        """Empties the file if it is not ours, and truncates it to the limit. Raises OSError if it cannot be written."""
        if not self.is_ours():
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._header, 0)
        elif os.fstat(self._descriptor).st_size > self._offset(self.num_records):
            os.ftruncate(self._descriptor, self._offset(self.num_records))

    def close(self) -> None:
        os.close(self._descriptor)

    def found(self) -> Iterator[Found]:
        """The records whose heads are intact; only reading one shows whether its page is too."""
        stop = min(self.num_records, (os.fstat(self._descriptor).st_size - _HEADER_BYTES) // self._stride)
        for record in range(stop):
            head = os.pread(self._descriptor, _RECORD.size + _CHECKSUM.size, self._offset(record))
            own = head[: _RECORD.size]
            if head == own + _sum_of(own):
                digest, order = _RECORD.unpack(own)
                yield Found(order, digest, record)

    def read(self, record: int, digest: bytes, into: memoryview) -> bool:
        """Whether the record is that page, intact. If not, the contents of `into` must not be used."""
        head = bytearray(_RECORD_BYTES)
        try:
            num_read = os.preadv(self._descriptor, [head, into], self._offset(record))
        except OSError:
            return False
        own = bytes(head[: _RECORD.size])
        if num_read != self._stride or own[: len(digest)] != digest:
            return False
        return bytes(head) == _head(own, into)

    def write(self, record: int, digest: bytes, order: int, page: memoryview) -> None:
        """Raises OSError if there is no room; the record then counts as missing."""
        head = _head(_RECORD.pack(digest, order), page)
        if os.pwritev(self._descriptor, [head, page], self._offset(record)) != self._stride:
            raise OSError("the disk took only a part of a page")

    def write_index(self, digests: Sequence[bytes]) -> None:
        """Ends the file with an index of its records' digests, so that opening it later need not scan the records."""
        index = b"".join(digests)
        os.pwrite(self._descriptor, index + _sum_of(index), self._offset(len(digests)))

    def read_index(self) -> tuple[bytes, ...] | None:
        """The digests of its records; None if the file does not end with an intact index of all of them."""
        size = os.fstat(self._descriptor).st_size - _HEADER_BYTES - _CHECKSUM.size
        num_records, rest = divmod(size, self._stride + _DIGEST_BYTES)
        if num_records < 0 or rest or num_records > self.num_records:
            return None
        found = os.pread(self._descriptor, num_records * _DIGEST_BYTES + _CHECKSUM.size, self._offset(num_records))
        index = found[: num_records * _DIGEST_BYTES]
        if found != index + _sum_of(index):
            return None
        return tuple(index[at : at + _DIGEST_BYTES] for at in range(0, len(index), _DIGEST_BYTES))

    @property
    def _stride(self) -> int:
        return _RECORD_BYTES + self.page_bytes

    def _offset(self, record: int) -> int:
        return _HEADER_BYTES + record * self._stride


def _head(own: bytes, page: memoryview) -> bytes:
    return (own + _sum_of(own) + _sum_of(own, page)).ljust(_RECORD_BYTES, b"\0")


def _sum_of(*parts: bytes | memoryview) -> bytes:
    total = 0
    for part in parts:
        total = crc32(part, total)
    return _CHECKSUM.pack(total)


def open_page_file(directory: Path, name: str | None, *, identity: bytes, page_bytes: int, limit: int) -> PageFile:
    """A file that outlives the process, or, without a name, one that disappears with it. Raises PageFileUnusable."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _temporary(directory) if name is None else _lasting(directory / name)
        try:
            file = PageFile(descriptor, identity=identity, page_bytes=page_bytes, limit=limit)
            file.prepare()
        except BaseException:
            os.close(descriptor)
            raise
        return file
    except OSError as error:
        raise PageFileUnusable(f"{directory} cannot take pages ({error.strerror or error})") from error


def _temporary(directory: Path) -> int:
    descriptor, path = tempfile.mkstemp(prefix="ostro-", suffix=".pages", dir=directory)
    os.unlink(path)
    return descriptor


def _lasting(path: Path) -> int:
    """Opens the file for this process alone. Nobody else may read it: it holds keys and values of prompts."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    reason = why_untrusted(descriptor, group_may_write=False)
    if reason is None and os.fstat(descriptor).st_nlink != 1:
        # Writing would also change the file under its other name.
        reason = "has more than one hard link"
    if reason is None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "is in use by another process"
        except OSError:
            # Some network file systems have no locks.
            reason = "is on a file system without locks"
    if reason is None:
        try:
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            reason = f"may stay readable by others ({error.strerror})"
    if reason is None:
        return descriptor
    with suppress(OSError):
        os.close(descriptor)
    raise PageFileUnusable(f"{path} {reason}")


def pages_within(limit: int, page_bytes: int) -> int:
    """How many pages fit into a file of `limit` bytes."""
    return max(0, (limit - _HEADER_BYTES) // (_RECORD_BYTES + page_bytes))


def file_bytes(num_pages: int, page_bytes: int) -> int:
    """The size of a file of `num_pages` pages, without an index."""
    return _HEADER_BYTES + num_pages * (_RECORD_BYTES + page_bytes)


__all__ = ["Bytes", "Found", "PageFile", "PageFileUnusable", "file_bytes", "open_page_file", "pages_within"]

"""A file of packed matrices and plain vectors, written once and then memory-mapped. Knows bytes; knows no models.

    head │ matrices and vectors, each aligned to 64 bytes … │ header, JSON

    head    "OSTRO CPU" │ the header's offset, size and checksum │ checksum of the head
    header  panel width, matrices, vectors, the program, the file's key, checksum of the data

Every byte is covered by a checksum, and all are verified before anything is mapped: a file is either exactly what was
written, or an error. Checksums detect damage, not forgery, so a file that another user could have written is refused.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from ctypes import Array, addressof, byref, c_char
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu import huge_pages
from ostro.kernels.cpu.library import CMatrix, library
from ostro.kernels.cpu.packed_layout import ALIGN, MatrixEntry, PackedLayout, VectorEntry
from ostro.system.file_trust import why_untrusted

MAGIC = b"OSTRO CPU"
# Magic, the header's offset, size and checksum; followed by the checksum of all that.
_HEAD = struct.Struct("<16sQQQ16x")
_SUM = struct.Struct("<Q")
_MOST_HEADER = 64 << 20
_READ_BYTES = 1 << 18
# A CPU's address cache covers as much in small pages.
_LEAST_HUGE = 4 << 20
# The last page is rarely whole.
_MOSTLY = 0.9
assert _HEAD.size + _SUM.size == ALIGN

Floats = npt.NDArray[np.float32]


class BadPackedFile(BadCheckpoint):
    """A packed file that must not be used."""

    reason = ""
    """The message's part after the file's name."""


def _bad(path: Path, reason: str) -> BadPackedFile:
    error = BadPackedFile(f"{path} {reason}. Delete it: it is made again.")
    error.reason = reason
    return error


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    panel: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    matrices: list[MatrixEntry]
    vectors: list[VectorEntry]
    program: dict[str, Any]
    key: str
    """Identifies the weights and how they were packed: a file with another key is not used."""
    data: Annotated[int, msgspec.Meta(ge=0)]
    """The checksum of everything between head and header."""


class PackedWriter:
    """Writes the data, then the header, and last the head, which says where the header is."""

    def __init__(self, file: BinaryIO, panel: int, *, key: str = "", threads: int = 1) -> None:
        self.panel = panel
        self._layout = PackedLayout(panel)
        self._file, self._key, self._threads = file, key, threads

    def allocate(self, nbytes: int) -> None:
        """Reserves disk space for everything before anything is written: running out of space while writing to a
        mapping would raise a signal.
        """
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        else:
            for at in range(0, nbytes, _READ_BYTES):
                self._file.write(bytes(min(_READ_BYTES, nbytes - at)))
            self._file.flush()

    def matrix(self, source: int, rows: npt.NDArray[np.uint64], cols: int, bits: int = 0) -> int | None:
        """Packs rows given by their addresses, where 0 means a row of zeros; see `PackedLayout.matrix`."""
        number = self._layout.matrix(source, len(rows), cols, bits)
        if number is None:
            return None
        entry = self._layout.matrices[number]
        padded = np.zeros(entry.rows, np.uint64)
        padded[: len(rows)] = rows
        with mmap.mmap(self._file.fileno(), self._layout.nbytes) as mapped:
            target = np.frombuffer(mapped, np.uint8, offset=entry.at)
            library().ostro_pack(
                source, padded.ctypes.data, byref(entry.described()), self.panel, self._threads, target.ctypes.data
            )
            del target
        return number

    def vector(self, values: Floats) -> int:
        number = self._layout.vector(values.size)
        self._file.seek(self._layout.vectors[number].at)
        self._file.write(np.ascontiguousarray(values, np.float32).tobytes())
        return number

    def finish(self, program: Mapping[str, Any]) -> None:
        layout = self._layout
        self._file.flush()
        data = _digest_of(self._file, ALIGN, layout.nbytes)
        header = msgspec.json.encode(
            Header(self.panel, layout.matrices, layout.vectors, dict(program), key=self._key, data=data)
        )
        self._file.seek(layout.nbytes)
        self._file.write(header)
        head = _HEAD.pack(MAGIC, layout.nbytes, len(header), digest(header))
        self._file.seek(0)
        self._file.write(head + _SUM.pack(digest(head)))
        self._file.flush()
        os.fsync(self._file.fileno())


class PackedFile:
    """A mapped and fully verified file. Its memory is valid as long as this object lives."""

    def __init__(self, file: BinaryIO, path: Path, *, key: str = "") -> None:
        """BadPackedFile unless it is complete and was written for this key. `path` is only used in messages."""
        header = _checked(file, path)
        if header.key != key:
            raise _bad(path, "belongs to another model, or was packed in another way")
        self.path = path
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.panel = header.panel
        self.program = header.program
        self.matrices = header.matrices
        self._vectors = header.vectors
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.nbytes = len(self._map)
        self.is_copied = False
        """Whether the weights lie in memory of this process's own rather than in the file's."""

    @classmethod
    def open(cls, path: Path, *, key: str = "") -> "PackedFile":
        """Opens a file. Raises BadPackedFile as above, and if another user could have written it."""
        with path.open("rb") as file:
            _check_owner(file, path)
            return cls(file, path, key=key)

    def take_huge_pages(self, most_copied: int, threads: int) -> None:
        """Moves the weights into huge pages, before anything points to them: those of the file, which processes share,
        if the kernel has them for files, and otherwise a copy's, if it takes at most so many bytes.
        """
        if self.nbytes < _LEAST_HUGE or not huge_pages.are_there():
            return
        huge_pages.gather(self._map)
        if self.huge_bytes < self.nbytes * _MOSTLY and self.nbytes <= most_copied:
            try:
                self._bytes = huge_pages.copied(self._map, threads)
            except OSError:
                pass
            else:
                self._map.close()
                self.is_copied = True
        if not self.is_copied:
            huge_pages.populate(self._map)

    @property
    def huge_bytes(self) -> int:
        """How much of it lies in huge pages."""
        return huge_pages.count(self._bytes)

    def pointed(self) -> "Array[CMatrix]":
        """The matrices in the kernels' format."""
        lib = library()
        found = (CMatrix * len(self.matrices))(*(each.described() for each in self.matrices))
        for matrix, entry in zip(found, self.matrices, strict=True):
            lib.ostro_point(byref(matrix), self._bytes.ctypes.data + entry.at)
        return found

    @property
    def num_vectors(self) -> int:
        return len(self._vectors)

    def vector(self, number: int) -> Floats:
        entry = self._vectors[number]
        return self._bytes[entry.at : entry.at + entry.nbytes].view(np.float32)


def damage(path: Path) -> str | None:
    """What is wrong with a packed file, whatever its key; None if nothing is."""
    try:
        with path.open("rb") as file:
            _check_owner(file, path)
            _checked(file, path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except BadPackedFile as error:
        return error.reason
    return None


def digest(data: bytes) -> int:
    return int(library().ostro_digest(np.frombuffer(data, np.uint8).ctypes.data, len(data), 0))


# --- verification ---------------------------------------------------------------------------------------------------


def _check_owner(file: BinaryIO, path: Path) -> None:
    if (reason := why_untrusted(file.fileno())) is not None:
        raise _bad(path, reason)


def _checked(file: BinaryIO, path: Path) -> Header:
    """The file's header, after verifying every byte."""
    try:
        size = os.fstat(file.fileno()).st_size
        at, header = _read_header(file, path, size)
        _check_places(header, at, path)
        if _digest_of(file, ALIGN, at) != header.data:
            raise _bad(path, "is damaged: its weights do not have their checksum")
    except (OSError, msgspec.MsgspecError) as error:
        raise _bad(path, f"cannot be read ({error})") from error
    return header


def _read_header(file: BinaryIO, path: Path, size: int) -> tuple[int, Header]:
    file.seek(0)
    start = file.read(ALIGN)
    if len(start) < ALIGN or not start.startswith(MAGIC):
        raise _bad(path, "is not a packed weights file")
    head = start[: _HEAD.size]
    magic, at, nbytes, expected = _HEAD.unpack(head)
    if magic.rstrip(b"\0") != MAGIC or _SUM.unpack(start[_HEAD.size :])[0] != digest(head):
        raise _bad(path, "is damaged, or of another version of Ostro")
    if at < ALIGN or nbytes > _MOST_HEADER or at + nbytes != size:
        raise _bad(path, f"is damaged: it has {size} bytes instead of {at + nbytes}")
    file.seek(at)
    text = file.read(nbytes)
    if len(text) != nbytes or digest(text) != expected:
        raise _bad(path, "is damaged: its header does not have its checksum")
    return at, msgspec.json.decode(text, type=Header)


def _check_places(header: Header, end: int, path: Path) -> None:
    for entry in header.matrices:
        if library().ostro_packed_bytes(byref(entry.described()), header.panel) != entry.nbytes:
            raise _bad(path, "is damaged: it describes an impossible matrix")
    places: list[MatrixEntry | VectorEntry] = [*header.matrices, *header.vectors]
    for place in places:
        if place.at + place.nbytes + ALIGN > end:
            raise _bad(path, "is damaged: it places weights beyond its end")


def _digest_of(file: BinaryIO, start: int, end: int) -> int:
    """Reads instead of mapping: a disk error is then an exception rather than a signal."""
    buffer = bytearray(_READ_BYTES)
    address = addressof(c_char.from_buffer(buffer))
    lib, found = library(), 0
    file.seek(start)
    with memoryview(buffer) as view:
        for at in range(start, end, _READ_BYTES):
            wanted = min(_READ_BYTES, end - at)
            # Missing from typeshed's BinaryIO, but every binary file has it.
            if file.readinto(view[:wanted]) != wanted:  # type: ignore[attr-defined]
                raise OSError("it ends early")
            found = int(lib.ostro_digest(address, wanted, found))
    return found

"""A file of packed matrices and plain vectors, written once and mapped ever after. Knows bytes; knows no models.

    "OSTRO CPU" │ where the header is │ matrices and vectors, each on a boundary of 64 bytes … │ header, JSON

Panels are as wide as an instruction set wants them: the header says how wide, and whoever opens the file looks.
"""

import json
import mmap
import os
from collections.abc import Mapping
from ctypes import Array, byref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import CMatrix, library

MAGIC = b"OSTRO CPU"
_ALIGN = 64
_HEAD = len(MAGIC) + 8

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    rows: int
    cols: int
    codes: int
    scales: int
    has_minima: int
    at: int
    nbytes: int

    def described(self) -> CMatrix:
        return CMatrix(rows=self.rows, cols=self.cols, codes=self.codes, scales=self.scales, has_minima=self.has_minima)


@dataclass(frozen=True, slots=True)
class VectorEntry:
    count: int
    at: int


class PackedWriter:
    """Writes the data first and the header after it; the beginning of the file, which tells where that is, last."""

    def __init__(self, path: Path, panel: int, *, threads: int = 1) -> None:
        self._panel, self._threads = panel, threads
        self._file: BinaryIO = path.open("w+b")
        self._size = _ALIGN
        self._matrices: list[MatrixEntry] = []
        self._vectors: list[VectorEntry] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def matrix(self, source: int, rows: npt.NDArray[np.uint64], cols: int, bits: int = 0) -> int | None:
        """Packs rows of GGUF's type `source`, given by their addresses; 0 is a row of zeros.

        Floats are brought down to so many bits; 0 leaves everything at its own precision. Returns the matrix's number,
        or None where such rows cannot be packed.
        """
        lib = library()
        padded = np.zeros(-(-len(rows) // self._panel) * self._panel, np.uint64)
        padded[: len(rows)] = rows
        matrix = CMatrix(rows=len(padded), cols=cols)
        nbytes = lib.ostro_format(source, bits, byref(matrix))
        if nbytes < 0:
            return None
        at = self._reserve(nbytes)
        with mmap.mmap(self._file.fileno(), self._size) as mapped:
            target = np.frombuffer(mapped, np.uint8, offset=at)
            lib.ostro_pack(source, padded.ctypes.data, byref(matrix), self._panel, self._threads, target.ctypes.data)
            del target
        entry = MatrixEntry(matrix.rows, cols, matrix.codes, matrix.scales, matrix.has_minima, at, nbytes)
        self._matrices.append(entry)
        return len(self._matrices) - 1

    def vector(self, values: Floats) -> int:
        at = self._reserve(values.size * 4)
        self._file.seek(at)
        self._file.write(np.ascontiguousarray(values, np.float32).tobytes())
        self._file.flush()
        self._vectors.append(VectorEntry(values.size, at))
        return len(self._vectors) - 1

    def finish(self, program: Mapping[str, Any]) -> None:
        header = {
            "panel": self._panel,
            "matrices": [asdict(each) for each in self._matrices],
            "vectors": [asdict(each) for each in self._vectors],
            "program": program,
        }
        self._file.seek(self._size)
        self._file.write(json.dumps(header).encode())
        self._file.seek(0)
        self._file.write(MAGIC + self._size.to_bytes(8, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _reserve(self, nbytes: int) -> int:
        at = self._size
        # Readers may look a little beyond a matrix's end.
        size = -(-nbytes // _ALIGN) * _ALIGN + _ALIGN
        self._size += size
        # Room on the disk before it is mapped: a store into a map can only fail by a signal.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), at, size)
        else:
            self._file.seek(at)
            self._file.write(bytes(size))
            self._file.flush()
        return at


class PackedFile:
    """A mapped file. Its memory lives as long as this does."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if len(head) < _HEAD or head[: len(MAGIC)] != MAGIC:
                raise BadCheckpoint(f"{path} is no file of packed weights. Delete it; it is made again.")
            file.seek(int.from_bytes(head[len(MAGIC) :], "little"))
            header = json.load(file)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.panel: int = header["panel"]
        self.program: dict[str, Any] = header["program"]
        self.matrices = [MatrixEntry(**each) for each in header["matrices"]]
        self._vectors = [VectorEntry(**each) for each in header["vectors"]]
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.nbytes = len(self._map)

    def pointed(self) -> "Array[CMatrix]":
        """The matrices as kernels take them."""
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
        return self._bytes[entry.at : entry.at + 4 * entry.count].view(np.float32)

"""Offsets of matrices and vectors in a packed file, and its size. Writes nothing, and imports no numpy."""

from ctypes import byref
from typing import Annotated

import msgspec

from ostro.kernels.cpu.library import CMatrix, library

ALIGN = 64
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Place = Annotated[int, msgspec.Meta(ge=ALIGN, le=2**62, multiple_of=ALIGN)]


class MatrixEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: _Count
    cols: _Count
    codes: _Count
    scales: _Count
    has_minima: _Count
    at: _Place
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]

    def described(self) -> CMatrix:
        return CMatrix(rows=self.rows, cols=self.cols, codes=self.codes, scales=self.scales, has_minima=self.has_minima)


class VectorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: _Count
    at: _Place

    @property
    def nbytes(self) -> int:
        return 4 * self.count


class PackedLayout:
    def __init__(self, panel: int) -> None:
        self.panel = panel
        self.nbytes = ALIGN
        self.matrices: list[MatrixEntry] = []
        self.vectors: list[VectorEntry] = []

    def matrix(self, source: int, rows: int, cols: int, bits: int = 0) -> int | None:
        """Reserves space for this many rows of GGUF's type `source`, padded to whole panels.

        Floats are quantized to `bits`; 0 keeps the stored precision. Returns the matrix's number, or None if such rows
        cannot be packed.
        """
        matrix = CMatrix(rows=-(-rows // self.panel) * self.panel, cols=cols)
        nbytes = library().ostro_format(source, bits, byref(matrix))
        if nbytes < 0:
            return None
        at = self._reserve(nbytes)
        self.matrices.append(MatrixEntry(matrix.rows, cols, matrix.codes, matrix.scales, matrix.has_minima, at, nbytes))
        return len(self.matrices) - 1

    def vector(self, count: int) -> int:
        self.vectors.append(VectorEntry(count, self._reserve(count * 4)))
        return len(self.vectors) - 1

    def _reserve(self, nbytes: int) -> int:
        at = self.nbytes
        # Kernels may read slightly beyond a matrix's end.
        self.nbytes += -(-nbytes // ALIGN) * ALIGN + ALIGN
        return at

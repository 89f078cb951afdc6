"""One quantised weight of a checkpoint: decoded, or repacked for the native core, a few rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from ostro.weights.arrays import Bytes, Floats, WeightArray
from ostro.weights.forms import Form
from ostro.weights.quantized.blocks import BLOCK_BYTES, GROUP, requantized
from ostro.weights.read_ahead import run_ahead

# Values decoded at a time: few enough to stay in a core's cache.
_CHUNK_VALUES = 1 << 18
# The most codes that share a 32-bit word along the rows.
_ROW_MULTIPLE = 8


class Packing(NamedTuple):
    """How the native core packs a weight."""

    format: str
    """GGUF's name of the type."""
    how: str
    """What becomes of the stored numbers, in words."""
    form: Form | None = None
    """The form in which a GPU could keep them; None if there is none."""


REQUANTIZED = "requantised to 8 bits"


def repacked_at_best(columns: int, form: Form | None = None) -> Packing:
    """For numbers that fit no type exactly. Rounds far less than their 4-bit or FP8 codes did."""
    return Packing("F32", "widened to float32", form) if columns % GROUP else Packing("Q8_0", REQUANTIZED, form)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix, or a stack of them, that is stored in several tensors."""

    shape: tuple[int, ...]
    packing: Packing
    decode: Callable[[slice], Floats]
    """Some rows in float32. All matrices of a stack count as one."""
    repack: Callable[[slice], Bytes] | None = None
    """The same rows in the packing's blocks; None to requantise what is decoded."""
    transposed: bool = False
    """Whether the rows are the weight's columns."""
    source: object = None
    """What it is decoded from, for code that can keep it quantised: a `Grid` or `Tiled`."""

    @property
    def format(self) -> str:
        """The format of `stored`."""
        return self.packing.format

    @property
    def format_name(self) -> str:
        return self.packing.format

    @property
    def is_float(self) -> bool:
        return self.format == "F32"

    @property
    def is_quantized(self) -> bool:
        return not self.is_float

    def floats(self) -> Floats:
        """The weight in float32, as exactly as possible."""
        values = np.empty(self._matrix, np.float32)
        # NaN and overflow are left to the caller to detect.
        with np.errstate(invalid="ignore", over="ignore"):
            for rows in self._chunks():
                values[rows] = self.decode(rows)
        stacked = values.reshape(self._rows_shape)
        return stacked.swapaxes(-1, -2) if self.transposed else stacked

    def stored(self) -> WeightArray:
        """The weight repacked for the native core. Raises DoesNotFit if that is impossible."""
        if self.is_float:
            return WeightArray.of(self.floats())
        num_rows, columns = self._matrix
        raw = np.empty((num_rows, columns // GROUP * BLOCK_BYTES[self.format]), np.uint8)
        chunks = list(self._chunks())
        for rows, repacked in zip(chunks, run_ahead(partial(self._repacked, rows) for rows in chunks), strict=True):
            raw[rows] = repacked
        raw = raw.reshape(*self._rows_shape[:-1], -1)
        return WeightArray(self.format, self.shape, raw, transposed=self.transposed)

    def _repacked(self, rows: slice) -> Bytes:
        # Set here, because numpy's error state is per thread.
        with np.errstate(invalid="ignore", over="ignore"):
            return requantized(self.decode(rows)) if self.repack is None else self.repack(rows)

    @property
    def _rows_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def _matrix(self) -> tuple[int, int]:
        """All rows, and their length."""
        *outer, columns = self._rows_shape
        return prod(outer), columns

    def _chunks(self) -> Iterator[slice]:
        num_rows, columns = self._matrix
        step = max(1, _CHUNK_VALUES // columns // _ROW_MULTIPLE) * _ROW_MULTIPLE
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

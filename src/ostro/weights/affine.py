"""Weights as unsigned codes with a scale, and a zero point or minimum, per group of columns: what grids of quantised
checkpoints and most of GGUF's types have in common. Imports no torch.

    weight = (code - zero) · scale          grids, Q4_0, Q5_0, Q8_0, Q6_K
    weight = code · scale + minimum         Q4_1, Q5_1, Q4_K, Q5_K
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.weights.arrays import Bytes, Floats, Weight, WeightArray
from ostro.weights.forms import GGUF_FORMS, Form
from ostro.weights.quantized.grid import Grid
from ostro.weights.quantized.weight import QuantizedWeight

# In its blocks of 256, K types keep scales and minima in 6 bits each.
_SUPER = 256
# The largest relative error of rounding to float16, for numbers in its normal range.
_HALF_ROUNDING = 2.0**-11


class Rows(NamedTuple):
    """Some rows of a weight."""

    codes: Bytes
    """[rows, columns]"""
    scales: Floats
    """[rows, groups]"""
    seconds: Floats
    """Zero points or minima, [rows, groups]."""


@dataclass(frozen=True, slots=True)
class Affine:
    shape: tuple[int, int]
    form: Form
    has_minimum: bool
    rows: Callable[[slice], Rows]
    order: npt.NDArray[np.intp] | None = None
    """The row that holds each row of the weight; None if they are in order."""


def affine_of(weight: Weight) -> Affine | None:
    """The weight as codes; None if it is stored in another way."""
    if isinstance(weight, QuantizedWeight):
        return _of_grid(weight.source) if isinstance(weight.source, Grid) else None
    if not isinstance(weight, WeightArray) or weight.transposed or len(weight.shape) != 2:
        return None
    form = GGUF_FORMS.get(weight.format)
    read = _READERS.get(weight.format)
    if form is None or read is None:
        return None
    shape = (weight.shape[0], weight.shape[1])
    return Affine(shape, form, weight.format in _WITH_MINIMUM, partial(_some, weight.raw, read), weight.order)


def fits_halves(rows: Rows) -> bool:
    """Whether scales, zero points and minima fit float16, up to rounding."""
    return all(_near(values) for values in (rows.scales, rows.seconds))


def _near(values: Floats) -> bool:
    # An overflow does not fit.
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float16).astype(np.float32)
        return bool((np.abs(rounded - values) <= np.abs(values) * np.float32(_HALF_ROUNDING)).all())


def _of_grid(grid: Grid) -> Affine | None:
    if grid.group_of is not None:
        return None
    rows, columns = grid.shape
    group = min(grid.group, columns)
    groups = -(-columns // group)

    def read(some: slice) -> Rows:
        def of(table: npt.NDArray[np.generic]) -> Floats:
            own = table if len(table) == 1 else table[some]
            return np.broadcast_to(own.astype(np.float32), (some.stop - some.start, groups))

        return Rows(grid.codes(some), of(grid.scales), of(grid.zeros))

    return Affine((rows, columns), Form("int", grid.bits, group), False, read)


# ---- GGUF's blocks

_Read = Callable[[Bytes], tuple[Bytes, Floats, Floats]]
"""Blocks, [number, bytes] -> codes [number, values], scales and seconds [number, groups]."""


def _some(raw: Bytes, read: _Read, rows: slice) -> Rows:
    own = np.ascontiguousarray(raw[rows])
    size = _BLOCK_BYTES[read]
    codes, scales, seconds = read(own.reshape(-1, size))
    count = len(own)
    return Rows(codes.reshape(count, -1), scales.reshape(count, -1), seconds.reshape(count, -1))


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(octets: Bytes) -> Bytes:
    """The lower halves of a block's bytes, then the upper ones."""
    return np.concatenate((octets & np.uint8(15), octets >> np.uint8(4)), axis=-1)


def _fifth_bits(octets: Bytes) -> Bytes:
    """32 bits, each as 0 or 16: the fifth bits of codes whose other bits are nibbles."""
    return np.unpackbits(octets, axis=-1, bitorder="little") << np.uint8(4)


def _fixed(scales: Floats, zero: float) -> Floats:
    return np.full_like(scales, zero)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, _fixed(scales, 8.0)


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, _fixed(scales, 16.0)


def _q5_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scales, _fixed(scales, 128.0)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of eight groups: twelve bytes hold 6 bits of each."""
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=-1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), axis=-1)
    return _half(blocks, 0) * scales.astype(np.float32), -_half(blocks, 2) * minima.astype(np.float32)


def _pairs_of_groups(octets: Bytes) -> Bytes:
    """Each 32 bytes hold one group in their lower halves and the next in the upper ones."""
    return _nibbles(octets.reshape(len(octets), -1, 32)).reshape(len(octets), _SUPER)


def _q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _pairs_of_groups(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    # Bit g of byte i is the fifth bit of code i in group g.
    bits = np.unpackbits(blocks[:, 16:48, None], axis=-1, bitorder="little").swapaxes(1, 2)
    fifth = bits.reshape(len(blocks), _SUPER) << np.uint8(4)
    return _pairs_of_groups(blocks[:, 48:]) | fifth, *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    # Each 128 codes are four runs of 32. A byte of `low` holds the lower four bits of two runs, a byte of `high` the
    # upper two bits of all four.
    nibbles = np.concatenate((low & np.uint8(15), low >> np.uint8(4)), axis=2)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    codes = nibbles | ((high >> shifts & np.uint8(3)) << np.uint8(4))
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes.reshape(-1, _SUPER), scales, _fixed(scales, 32.0)


_READERS: Mapping[str, _Read] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_BLOCK_BYTES: Mapping[_Read, int] = {
    _q4_0: 18,
    _q4_1: 20,
    _q5_0: 22,
    _q5_1: 24,
    _q8_0: 34,
    _q4_k: 144,
    _q5_k: 176,
    _q6_k: 210,
}

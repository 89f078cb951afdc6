"""Float8 numbers with a scale per tile of rows and columns: a block, a row, or the whole weight. Imports no torch."""

from dataclasses import dataclass
from math import prod

import numpy as np

from ostro.weights.arrays import Floats, WeightArray
from ostro.weights.forms import Form
from ostro.weights.quantized.parts import SCALES, Header, Parts, T, finite
from ostro.weights.quantized.scheme import WEIGHT
from ostro.weights.quantized.weight import Packing, QuantizedWeight, repacked_at_best

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE_FORMATS = (*SCALES, "F8_E8M0")
Tile = tuple[int, int]


def tile_of(parts: Parts[T], part: str, block: Tile | None) -> Tile:
    """How many rows and columns of the weight share a scale. `block` is the config's, if it has one."""
    rows, columns = parts[WEIGHT].shape
    scale: Header = parts[part]
    if scale.format not in _SCALE_FORMATS:
        raise parts.wrong(part, f"holds {scale.format} instead of {' or '.join(_SCALE_FORMATS)}")
    shape = scale.shape
    if prod(shape) == 1:
        return rows, columns
    if block is not None and shape == tuple(
        -(-size // step) for size, step in zip((rows, columns), block, strict=True)
    ):
        return block
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    if len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
        return 1, columns // shape[1]
    asked = "one scale, or one a row" if block is None else f"one scale for each {block[0]} rows and {block[1]} columns"
    raise parts.wrong(part, f"has shape {shape}, but a weight of shape {(rows, columns)} needs {asked}")


@dataclass(frozen=True, slots=True)
class Tiled:
    """Float8 numbers and their scales."""

    codes: WeightArray
    scales: Floats
    """[tiles of rows, tiles of columns]"""
    tile: Tile

    def decode(self, rows: slice) -> Floats:
        columns = self.codes.shape[1]
        values = self.codes.cut((rows, slice(0, columns))).floats()
        scales = self.scales[np.arange(rows.start, rows.stop) // self.tile[0]]
        values *= scales if self.scales.shape[1] == 1 else np.repeat(scales, self.tile[1], axis=1)[:, :columns]
        return values

    def row_scales(self) -> Floats | None:
        """One for each row; None if a row has several."""
        if self.scales.shape[1] > 1:
            return None
        return np.repeat(self.scales[:, 0], self.tile[0])[: self.codes.shape[0]]


def float8_shape(parts: Parts[T], part: str, block: Tile | None) -> tuple[int, int]:
    rows, columns = parts.take(WEIGHT, FLOAT8, 2).shape
    tile_of(parts, part, block)
    return rows, columns


def float8_weight(parts: Parts[WeightArray], part: str, block: Tile | None) -> QuantizedWeight:
    shape = float8_shape(parts, part, block)
    tile = tile_of(parts, part, block)
    scales = finite(parts, part).reshape(-(-shape[0] // tile[0]), -(-shape[1] // tile[1]))
    tiled = Tiled(parts[WEIGHT], scales, tile)
    return QuantizedWeight(shape, float8_packing(shape), tiled.decode, source=tiled)


def float8_packing(shape: tuple[int, int]) -> Packing:
    return repacked_at_best(shape[1], Form("float", 8, shape[1]))

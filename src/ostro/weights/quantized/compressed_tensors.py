"""Checkpoints with `quant_method: compressed-tensors`.

float-quantized   weight float8 [out, in], weight_scale
int-quantized     weight int8 [out, in], weight_scale, weight_zero_point if asymmetric
pack-quantized    weight_packed int32 [out, in · bits / 32], weight_scale [out, groups], weight_shape [2];
                  weight_zero_point int32 [out · bits / 32, groups] if asymmetric; weight_g_idx [in] if the columns of a
                  group are not consecutive. Codes and zero points are stored unsigned.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ostro.errors import BadCheckpoint
from ostro.models.config import ConfigReader
from ostro.weights.arrays import WeightArray
from ostro.weights.quantized.fp8 import UNUSED_SCALES, block_size
from ostro.weights.quantized.grid import Codes, Grid, Zeros, grid_packing
from ostro.weights.quantized.parts import SCALES, Parts, T, finite, groups_of_columns, integers, unpacked
from ostro.weights.quantized.scheme import WEIGHT, Scheme, Shape, refused
from ostro.weights.quantized.tiles import FLOAT8, Tile, float8_packing, float8_shape, float8_weight, tile_of
from ostro.weights.quantized.weight import Packing, QuantizedWeight

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_SCALE, _ZERO, _PACKED, _SHAPE, _ORDER = (
    "weight_scale",
    "weight_zero_point",
    "weight_packed",
    "weight_shape",
    "weight_g_idx",
)


@dataclass(frozen=True, slots=True)
class CompressedTensors(Scheme):
    formats: tuple[str, ...]
    bits: int
    """Width of a packed weight."""
    block: Tile | None

    pattern: ClassVar[re.Pattern[str]] = re.compile(
        rf"(?P<module>.+)\.(?P<part>{WEIGHT}|{_SCALE}|{_ZERO}|{_PACKED}|{_SHAPE}|{_ORDER})"
    )
    unused: ClassVar[re.Pattern[str]] = UNUSED_SCALES

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        groups = config.table("config_groups")
        if not groups:
            raise BadCheckpoint(f"{config.source} has no 'config_groups'. Download the model again.")
        sparsity = config.table("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise refused(f"compressed-tensors and the sparsity format {sparsity['format']}")
        # Rotations of weights are part of the stored numbers; others are computed with every input.
        if any(not location.startswith("weight") for location in _locations(config)):
            raise refused("compressed-tensors and transforms of activations")
        formats, bits, blocks = set(), set(), set()
        for name in groups:
            group = _table(ConfigReader(groups, f"{config.source}, config_groups"), name)
            if group.table("weights") is None:
                # This group only rounds activations.
                continue
            format = group.text("format", "") or config.text("format", "dense")
            if format not in _FORMATS:
                raise refused(f"compressed-tensors in the format {format}")
            weights = _table(group, "weights")
            number = weights.integer("num_bits", most=64)
            if number != 8 and (number != 4 or format != "pack-quantized"):
                raise refused(f"compressed-tensors in the format {format} with {number} bits")
            formats.add(format)
            blocks.add(block_size(weights, "block_structure"))
            if format == "pack-quantized":
                bits.add(number)
        if not formats:
            raise refused("compressed-tensors, but not its weights")
        if len(bits) > 1 or len(blocks) > 1:
            raise refused("compressed-tensors in groups of several bit widths or block sizes")
        return cls(tuple(sorted(formats)), next(iter(bits), 8), next(iter(blocks)))

    @property
    def label(self) -> str:
        packed = f", {self.bits} bits" if "pack-quantized" in self.formats else ""
        return f"compressed-tensors {' and '.join(self.formats)}{packed}"

    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        if _PACKED in parts:
            return self._packed_header(parts, parts.take(_PACKED, ["I32"], 2).shape[1] * 32 // self.bits)
        if _is_float8(parts):
            shape = float8_shape(parts, _SCALE, self.block)
            return shape, float8_packing(shape)
        rows, columns = parts.take(WEIGHT, ["I8"], 2).shape
        group = tile_of(parts, _SCALE, None)[1]
        if _ZERO in parts:
            parts.shaped(_ZERO, ["I8"], parts[_SCALE].shape)
        return (rows, columns), _packing(parts, 8, columns, group)

    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        if _PACKED in parts:
            return self._packed(parts).weight()
        if _is_float8(parts):
            return float8_weight(parts, _SCALE, self.block)
        self.header(parts)
        return _eight_bit_grid(parts).weight()

    def _packed_header(self, parts: Parts[T], columns: int) -> tuple[tuple[int, int], Packing]:
        per_word = 32 // self.bits
        rows, words = parts.take(_PACKED, ["I32"], 2).shape
        if words != -(-columns // per_word):
            raise parts.wrong(
                _PACKED, f"has {words} words a row, which do not hold {columns} codes of {self.bits} bits"
            )
        parts.shaped(_SHAPE, ["I64", "I32"], (2,))
        scale = parts[_SCALE]
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        if scale.format not in SCALES or scale.shape not in ((rows, groups), (1, 1), (1,)):
            raise parts.wrong(_SCALE, f"holds {scale.format} of shape {scale.shape}, not floats for {rows} rows")
        if not groups or columns % groups:
            raise parts.wrong(_SCALE, f"has {groups} groups, which do not divide {columns} columns")
        if _ZERO in parts:
            parts.shaped(_ZERO, ["I32"], (-(-rows // per_word), groups))
        if _ORDER in parts:
            parts.shaped(_ORDER, ["I32", "I64"], (columns,))
        return (rows, columns), _packing(parts, self.bits, columns, None if _ORDER in parts else columns // groups)

    def _packed(self, parts: Parts[WeightArray]) -> Grid:
        self.header(parts)
        words = integers(parts[_PACKED])
        told = integers(parts[_SHAPE])
        rows, columns = len(words), int(told[1])
        if told[0] != rows or columns < 1:
            raise parts.wrong(_SHAPE, f"says {told.tolist()}, but there are {rows} rows")
        self._packed_header(parts, columns)
        scales = finite(parts, _SCALE)
        scales = scales.reshape(-1, scales.shape[-1])
        zeros: Zeros = np.full((1, 1), 1 << (self.bits - 1), np.int16)
        if _ZERO in parts:
            zeros = unpacked(integers(parts[_ZERO]).T, self.bits)[:, :rows].T.astype(np.int16)

        def codes(some: slice) -> Codes:
            return unpacked(words[some], self.bits)[:, :columns]

        group, order = columns // scales.shape[1], None
        # As the library initialises it, it holds only -1: nothing was reordered.
        if _ORDER in parts and not (integers(parts[_ORDER]) == -1).all():
            order = groups_of_columns(parts, _ORDER, scales.shape[1])
        return Grid((rows, columns), self.bits, codes, scales, parts[_SCALE].format, zeros, group, order)


def _eight_bit_grid(parts: Parts[WeightArray]) -> Grid:
    rows, columns = parts[WEIGHT].shape
    group = tile_of(parts, _SCALE, None)[1]
    signed = integers(parts[WEIGHT]).view(np.uint8)
    # Grids have unsigned codes: flipping the sign bit adds 128.
    zeros: Zeros = np.full((1, 1), 128, np.int16)
    if _ZERO in parts:
        zeros = zeros + integers(parts[_ZERO]).astype(np.int16).reshape(-1, columns // group)
    scales = finite(parts, _SCALE).reshape(-1, columns // group)
    return Grid(
        (rows, columns), 8, lambda some: signed[some] ^ np.uint8(128), scales, parts[_SCALE].format, zeros, group
    )


def _is_float8(parts: Parts[T]) -> bool:
    return parts[WEIGHT].format in FLOAT8


def _packing(parts: Parts[T], bits: int, columns: int, group: int | None) -> Packing:
    symmetric = _ZERO not in parts
    return grid_packing(bits=bits, symmetric=symmetric, columns=columns, group=group, scales=parts[_SCALE].format)


def _table(config: ConfigReader, key: str) -> ConfigReader:
    return ConfigReader(config.table(key) or {}, f"{config.source}, {key}")


def _locations(config: ConfigReader) -> Iterator[str]:
    """The places where `transform_config` applies transforms."""
    groups = (config.table("transform_config") or {}).get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for each in applied if isinstance(applied, list) else ():
            if isinstance(each, Mapping):
                yield str(each.get("location"))

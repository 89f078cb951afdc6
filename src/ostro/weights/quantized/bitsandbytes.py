"""Checkpoints with `quant_method: bitsandbytes`.

4 bits (nf4, fp4), all numbers of a weight in one row:

    weight              uint8 [in · out / 2, 1]   two codes a byte, the higher first
    weight.quant_map    float32 [16]              the number that each code means
    weight.absmax       float32 [blocks]          the factor of a block's numbers; if it is uint8, its codes
    weight.nested_quant_map, .nested_absmax       mean factors in the same way, plus an offset
    weight.quant_state.bitsandbytes__nf4          JSON in uint8: shape, blocksize, nested_blocksize, nested_offset

8 bits: `weight` int8 [out, in] and `SCB` float32 [out], of which a code is a 127th.
"""

import json
import re
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

import numpy as np

from ostro.models.config import ConfigReader
from ostro.weights.arrays import Bytes, Floats, WeightArray
from ostro.weights.quantized.grid import Grid, grid_packing
from ostro.weights.quantized.parts import Parts, T, finite, integers
from ostro.weights.quantized.scheme import WEIGHT, Scheme, Shape, refused
from ostro.weights.quantized.weight import Packing, QuantizedWeight, repacked_at_best

_ABSMAX, _MAP = "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_ROW_SCALES = "SCB"
# An object of a dozen fields.
_MOST_STATE = 4096
_MOST_OFFSET = 1e30


@dataclass(frozen=True, slots=True)
class Bitsandbytes(Scheme):
    bits: int

    pattern: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<module>.+)\.(?P<part>SCB|weight(\.(nested_)?(absmax|quant_map)|\.quant_state\.bitsandbytes__(nf4|fp4))?)"
    )
    unused: ClassVar[re.Pattern[str]] = re.compile(r".+\.weight_format")

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        four = config.flag("load_in_4bit", False)
        if four == config.flag("load_in_8bit", False):
            raise config.bad("load_in_4bit", four, "true, or else 'load_in_8bit'")
        storage = config.text("bnb_4bit_quant_storage", "uint8")
        if four and storage != "uint8":
            raise refused(f"bitsandbytes in numbers of type {storage}")
        return cls(4 if four else 8)

    @property
    def label(self) -> str:
        return f"bitsandbytes, {self.bits} bits"

    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        """A 4-bit weight's shape is not in its headers: it is given as one row."""
        if _ROW_SCALES in parts:
            rows, columns = parts.take(WEIGHT, ["I8"], 2).shape
            parts.shaped(_ROW_SCALES, ["F32"], (rows,))
            return (rows, columns), grid_packing(bits=8, symmetric=True, columns=columns, group=columns, scales="F32")
        state = next((each for each in _STATES if each in parts), _STATES[0])
        parts.take(state, ["U8"], 1)
        octets = parts.take(WEIGHT, ["U8"], len(parts[WEIGHT].shape))
        parts.shaped(_MAP, ["F32"], (16,))
        if parts[_ABSMAX].format == "U8":
            parts.shaped(_NESTED_MAP, ["F32"], (256,))
            parts.take(_NESTED_ABSMAX, ["F32"], 1)
        parts.take(_ABSMAX, ["F32", "U8"], 1)
        return (1, 2 * prod(octets.shape)), repacked_at_best(0)

    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        self.header(parts)
        if _ROW_SCALES not in parts:
            return _four_bits(parts)
        rows, columns = parts[WEIGHT].shape
        signed = integers(parts[WEIGHT]).view(np.uint8)
        scales = (finite(parts, _ROW_SCALES) / np.float32(127)).reshape(-1, 1)
        zeros = np.full((1, 1), 128, np.int16)
        return Grid(
            (rows, columns), 8, lambda some: signed[some] ^ np.uint8(128), scales, "F32", zeros, columns
        ).weight()


@dataclass(frozen=True, slots=True)
class _State:
    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float


def _four_bits(parts: Parts[WeightArray]) -> QuantizedWeight:
    state = _state(parts)
    octets = parts[WEIGHT].raw.reshape(-1)
    if prod(state.shape) != 2 * len(octets):
        raise parts.wrong(WEIGHT, f"holds {2 * len(octets)} codes, not those of a weight of shape {state.shape}")
    num_blocks = -(-2 * len(octets) // state.block)
    parts.shaped(_ABSMAX, ["F32", "U8"], (num_blocks,))
    table = _Looked(octets, finite(parts, _MAP), _scales(parts, state, num_blocks), state.block, state.shape[1])
    return QuantizedWeight(state.shape, repacked_at_best(state.shape[1]), table.decode)


def _scales(parts: Parts[WeightArray], state: _State, num_blocks: int) -> Floats:
    if parts[_ABSMAX].format == "F32":
        return finite(parts, _ABSMAX)
    parts.shaped(_NESTED_ABSMAX, ["F32"], (-(-num_blocks // state.nested_block),))
    outer = np.repeat(finite(parts, _NESTED_ABSMAX), state.nested_block)[:num_blocks]
    return finite(parts, _NESTED_MAP)[parts[_ABSMAX].raw.reshape(-1)] * outer + np.float32(state.nested_offset)


@dataclass(frozen=True, slots=True)
class _Looked:
    """Codes that index a table of numbers, times a scale per block of consecutive codes."""

    octets: Bytes
    table: Floats
    scales: Floats
    block: int
    columns: int

    def decode(self, rows: slice) -> Floats:
        start, stop = rows.start * self.columns, rows.stop * self.columns
        # Rows of odd length begin in the middle of a byte.
        octets = self.octets[start // 2 : -(-stop // 2)]
        codes = np.stack((octets >> np.uint8(4), octets & np.uint8(15)), axis=-1).reshape(-1)
        values = np.take(self.table, codes[start % 2 :][: stop - start])
        first = start // self.block
        scales = np.repeat(self.scales[first : -(-stop // self.block)], self.block)
        values *= scales[start - first * self.block :][: stop - start]
        return values.reshape(-1, self.columns)


def _state(parts: Parts[WeightArray]) -> _State:
    part = next(each for each in _STATES if each in parts)
    raw = parts[part].raw.reshape(-1)
    try:
        if len(raw) > _MOST_STATE:
            raise ValueError
        found = json.loads(raw.tobytes())
        if not isinstance(found, dict):
            raise ValueError
    except (ValueError, RecursionError) as error:
        raise parts.wrong(part, "holds no JSON object") from error
    config = ConfigReader(found, parts.prefix + part)
    shape = config.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise config.bad("shape", shape, "a list of two sizes")
    rows, columns = (ConfigReader({"shape": each}, config.source).integer("shape") for each in shape)
    nested = parts[_ABSMAX].format == "U8"
    return _State(
        (rows, columns),
        config.integer("blocksize", most=1 << 16),
        config.integer("nested_blocksize", most=1 << 16) if nested else 1,
        config.number("nested_offset", least=-_MOST_OFFSET, most=_MOST_OFFSET) if nested else 0.0,
    )

"""Checkpoints with `quant_method: mxfp4`, such as gpt-oss: stacks of experts' matrices in blocks of 32.

    NAME_blocks   uint8 [experts, out, in / 32, 16]   two codes of 4-bit floats (e2m1) a byte, the lower first
    NAME_scales   uint8 [experts, out, in / 32]       exponents of two, plus 127; 255 is NaN

NAME itself becomes [experts, in, out], as Hub checkpoints that are not quantised have it.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ostro.models.config import ConfigReader
from ostro.models.tensor_errors import not_finite
from ostro.weights.arrays import Bytes, Floats, WeightArray
from ostro.weights.quantized import blocks
from ostro.weights.quantized.parts import Parts, T
from ostro.weights.quantized.scheme import Scheme, Shape
from ostro.weights.quantized.weight import Packing, QuantizedWeight

_BLOCK = 32
_NAN = 255
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the number that each code means: integers."""
_PAIRS = np.stack((np.tile(_DOUBLED, 16), np.repeat(_DOUBLED, 16)), axis=-1).astype(np.float32)
"""The numbers of the lower and of the upper half of each byte."""
PACKING = Packing("MXFP4", "repacked exactly")


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?P<module>.+)_(?P<part>blocks|scales)")
    named: ClassVar[str] = "{module}"

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        del config
        return cls()

    @property
    def label(self) -> str:
        return "MXFP4"

    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        experts, rows, groups, width = parts.take("blocks", ["U8"], 4).shape
        if width != _BLOCK // 2:
            raise parts.wrong("blocks", f"has blocks of {width} bytes instead of {_BLOCK // 2}")
        parts.shaped("scales", ["U8"], (experts, rows, groups))
        return (experts, groups * _BLOCK, rows), PACKING

    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        shape, packing = self.header(parts)
        stack = BlockFloats(
            parts.prefix + "scales",
            parts["blocks"].raw.reshape(-1, shape[-2] // 2),
            parts["scales"].raw.reshape(-1, shape[-2] // _BLOCK),
        )
        return QuantizedWeight(shape, packing, stack.decode, stack.repack, transposed=True)


@dataclass(frozen=True, slots=True)
class _Blocks(ABC):
    """Rows of 4-bit floats in blocks that share a power of two."""

    name: str
    """Name of the tensor that holds the exponents."""

    def decode(self, rows: slice) -> Floats:
        doubled = self._doubled(rows).reshape(rows.stop - rows.start, -1, _BLOCK)
        doubled *= np.ldexp(np.float32(1), self._finite_exponents(rows).astype(np.int32) - 128)[..., None]
        return doubled.reshape(len(doubled), -1)

    def repack(self, rows: slice) -> Bytes:
        return self._blocks(rows, self._finite_exponents(rows))

    def _finite_exponents(self, rows: slice) -> Bytes:
        """[rows, blocks]"""
        exponents = self._exponents(rows)
        if exponents.max(initial=0) == _NAN:
            raise not_finite(self.name)
        return exponents

    @abstractmethod
    def _doubled(self, rows: slice) -> Floats:
        """Twice the numbers, without their powers of two."""

    @abstractmethod
    def _blocks(self, rows: slice, exponents: Bytes) -> Bytes:
        """GGUF's blocks."""

    @abstractmethod
    def _exponents(self, rows: slice) -> Bytes: ...


@dataclass(frozen=True, slots=True)
class BlockFloats(_Blocks):
    codes: Bytes
    """[rows, columns / 2]"""
    exponents: Bytes
    """[rows, columns / 32]"""

    def _doubled(self, rows: slice) -> Floats:
        return _taken(self.codes[rows])

    def _blocks(self, rows: slice, exponents: Bytes) -> Bytes:
        pairs = self.codes[rows]
        codes = np.stack((pairs & np.uint8(15), pairs >> np.uint8(4)), axis=-1)
        return blocks.mxfp4(codes.reshape(len(pairs), -1), exponents)

    def _exponents(self, rows: slice) -> Bytes:
        return self.exponents[rows]


@dataclass(frozen=True, slots=True)
class GgufBlockFloats(_Blocks):
    """The same in GGUF's type MXFP4: a block has its exponent, and 16 bytes, whose low halves come first."""

    raw: Bytes
    """[rows, columns / 32 * 17]"""

    def _doubled(self, rows: slice) -> Floats:
        octets = self._stored(rows)[..., 1:]
        by_octet = _taken(octets).reshape(*octets.shape, 2)
        return np.ascontiguousarray(by_octet.swapaxes(-1, -2)).reshape(len(octets), -1)

    def _blocks(self, rows: slice, exponents: Bytes) -> Bytes:
        del exponents
        return self.raw[rows]

    def _exponents(self, rows: slice) -> Bytes:
        return self._stored(rows)[..., 0]

    def _stored(self, rows: slice) -> Bytes:
        return self.raw[rows].reshape(rows.stop - rows.start, -1, 1 + _BLOCK // 2)


def _taken(octets: Bytes) -> Floats:
    """The pair of each byte. Pairs are looked up as one number each, because numpy is slow with rows of two."""
    return np.take(_PAIRS.view(np.uint64).reshape(-1), octets).view(np.float32)


def gguf_weight(name: str, shape: Shape, raw: Bytes) -> QuantizedWeight:
    """A matrix of GGUF's type MXFP4."""
    stored = GgufBlockFloats(name, raw)
    return QuantizedWeight(shape, PACKING, stored.decode, stored.repack)

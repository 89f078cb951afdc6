"""Checkpoints with `quant_method: awq` in the layout `gemm`: 4 bits, asymmetric.

qweight   int32 [in, out / 8]       codes of eight outputs in a word, in an order of their own
qzeros    int32 [groups, out / 8]   the same
scales    float16 [groups, out]
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from ostro.models.config import ConfigReader
from ostro.weights.arrays import WeightArray
from ostro.weights.quantized.gptq import group_size, grouped, in_groups
from ostro.weights.quantized.grid import Codes, Grid, grid_packing
from ostro.weights.quantized.parts import SCALES, Parts, T, finite, integers, unpacked
from ostro.weights.quantized.scheme import Scheme, Shape, refused
from ostro.weights.quantized.weight import Packing, QuantizedWeight

_BITS, _PER_WORD = 4, 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of its outputs."""


@dataclass(frozen=True, slots=True)
class Awq(Scheme):
    group: int | None

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?P<module>.+)\.(?P<part>qweight|qzeros|scales)")

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        version = config.text("version", "gemm").lower()
        bits = config.integer("bits" if config.get("w_bit") is None else "w_bit", _BITS, most=64)
        if version != "gemm" or bits != _BITS:
            raise refused(f"AWQ with {bits} bits in the layout {version}")
        return cls(group_size(config, "group_size" if config.get("q_group_size") is None else "q_group_size"))

    @property
    def label(self) -> str:
        return f"AWQ, 4 bits{in_groups(self.group)}"

    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        columns, words = parts.take("qweight", ["I32"], 2).shape
        groups = parts.take("scales", SCALES, 2).shape[0]
        rows = words * _PER_WORD
        parts.shaped("scales", SCALES, (groups, rows))
        parts.shaped("qzeros", ["I32"], (groups, words))
        group = grouped(parts, "scales", columns, groups, self.group)
        scales = parts["scales"].format
        return (rows, columns), grid_packing(bits=_BITS, symmetric=False, columns=columns, group=group, scales=scales)

    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        self.header(parts)
        words = integers(parts["qweight"])
        columns, rows = len(words), words.shape[1] * _PER_WORD

        def codes(some: slice) -> Codes:
            return np.ascontiguousarray(_in_order(words[:, some.start // _PER_WORD : -(-some.stop // _PER_WORD)]).T)

        scales = finite(parts, "scales")
        zeros = _in_order(integers(parts["qzeros"])).astype(np.int16)
        group = grouped(parts, "scales", columns, len(scales), self.group)
        return Grid((rows, columns), _BITS, codes, scales.T, parts["scales"].format, zeros.T, group).weight()


def _in_order(words: npt.NDArray[np.signedinteger]) -> Codes:
    nibbles = unpacked(words, _BITS).reshape(len(words), -1, _PER_WORD)
    return np.take(nibbles, _ORDER, axis=2).reshape(len(words), -1)

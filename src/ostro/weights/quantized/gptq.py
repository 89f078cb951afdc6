"""Checkpoints with `quant_method: gptq`, of 4 or 8 bits.

qweight   int32 [in · bits / 32, out]       codes of consecutive inputs in a word
qzeros    int32 [groups, out · bits / 32]   zero points, less one except in version 2
scales    float16 [groups, out]
g_idx     int32 [in]                        each input's group, if it was quantised in another order (`desc_act`)
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ostro.models.config import ConfigReader
from ostro.weights.arrays import WeightArray
from ostro.weights.quantized.grid import Codes, Grid, grid_packing
from ostro.weights.quantized.parts import SCALES, Parts, T, finite, groups_of_columns, integers, unpacked
from ostro.weights.quantized.scheme import Scheme, Shape, refused
from ostro.weights.quantized.weight import Packing, QuantizedWeight

_WIDTHS = (4, 8)


@dataclass(frozen=True, slots=True)
class Gptq(Scheme):
    bits: int
    group: int | None
    """Inputs per group; None if all are one group."""
    symmetric: bool
    reorders: bool
    zero_offset: int

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?P<module>.+)\.(?P<part>qweight|qzeros|scales|g_idx)")

    @classmethod
    def read(cls, config: ConfigReader) -> Self:
        bits = config.integer("bits", most=64)
        format = config.text("checkpoint_format", "gptq")
        if format not in ("gptq", "gptq_v2") or config.flag("is_marlin_format", False):
            raise refused(f"GPTQ in the layout {'marlin' if format == 'gptq' else format}")
        if bits not in _WIDTHS:
            raise refused(f"GPTQ with {bits} bits")
        reorders = config.flag("desc_act", False) and not config.flag("static_groups", False)
        offset = 0 if format == "gptq_v2" else 1
        return cls(bits, group_size(config, "group_size"), config.flag("sym", True), reorders, offset)

    @property
    def label(self) -> str:
        return f"GPTQ, {self.bits} bits{in_groups(self.group)}"

    def header(self, parts: Parts[T]) -> tuple[Shape, Packing]:
        bits, columns, rows = self._sizes(parts)
        groups = parts.take("scales", SCALES, 2).shape[0]
        group = grouped(parts, "scales", columns, groups, self.group)
        parts.shaped("scales", SCALES, (groups, rows))
        if rows % (32 // bits):
            raise parts.wrong("qweight", f"has {rows} outputs, not a multiple of {32 // bits}")
        parts.shaped("qzeros", ["I32"], (groups, rows * bits // 32))
        packing = grid_packing(
            bits=bits,
            symmetric=self.symmetric,
            columns=columns,
            group=None if self.reorders else group,
            scales=parts["scales"].format,
        )
        return (rows, columns), packing

    def weight(self, parts: Parts[WeightArray]) -> QuantizedWeight:
        self.header(parts)
        bits, columns, rows = self._sizes(parts)
        words = integers(parts["qweight"])

        def codes(some: slice) -> Codes:
            return unpacked(words[:, some].T, bits)

        scales = finite(parts, "scales")
        zeros = unpacked(integers(parts["qzeros"]), bits).astype(np.int16) + np.int16(self.zero_offset)
        groups = len(scales)
        order = groups_of_columns(parts, "g_idx", groups) if "g_idx" in parts else None
        group = grouped(parts, "scales", columns, groups, self.group)
        return Grid((rows, columns), bits, codes, scales.T, parts["scales"].format, zeros.T, group, order).weight()

    def _sizes(self, parts: Parts[T]) -> tuple[int, int, int]:
        """Bits, inputs and outputs. A module's bits may differ from the config's; g_idx reveals them."""
        words, rows = parts.take("qweight", ["I32"], 2).shape
        if "g_idx" not in parts:
            return self.bits, words * 32 // self.bits, rows
        (columns,) = parts.take("g_idx", ["I32"], 1).shape
        for bits in _WIDTHS:
            if words * 32 == columns * bits:
                return bits, columns, rows
        raise parts.wrong("qweight", f"has {words} words for each output, which hold no {columns} codes of 4 or 8 bits")


def group_size(config: ConfigReader, key: str) -> int | None:
    """None if all inputs are one group, which configs write as -1."""
    return None if config.get(key) == -1 else config.integer(key, 128)


def in_groups(group: int | None) -> str:
    return "" if group is None else f" in groups of {group}"


def grouped(parts: Parts[T], part: str, columns: int, groups: int, configured: int | None) -> int:
    """How many columns share a scale: as the config says, or else evenly divided. The last group may be smaller."""
    group = configured or columns
    if -(-columns // group) == groups:
        return group
    if columns % groups:
        raise parts.wrong(part, f"has {groups} groups for {columns} inputs, where the config has groups of {group}")
    return columns // groups

"""The form in which a stored weight could stay quantised in memory, read from its header. Imports no torch."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

_ROW_SCALE_BYTES, _PAIR_BYTES = 4, 4


class Form(NamedTuple):
    kind: Literal["int", "float"]
    """Integers with scales for groups of inputs, or 8-bit floats with scales."""
    bits: int
    group: int
    """Inputs that share a scale."""

    @property
    def format_name(self) -> str:
        return "fp8" if self.kind == "float" else f"int{self.bits}"

    def nbytes(self, rows: int, columns: int) -> int:
        """A matrix's size: floats with a scale per row, or integers with a scale and a minimum per group."""
        if self.kind == "float":
            return rows * (columns + _ROW_SCALE_BYTES)
        return rows * columns * self.bits // 8 + rows * (columns // self.group) * _PAIR_BYTES


GGUF_FORMS: Mapping[str, Form] = {
    "Q4_0": Form("int", 4, 32),
    "Q4_1": Form("int", 4, 32),
    "Q4_K": Form("int", 4, 32),
    "Q5_0": Form("int", 8, 32),
    "Q5_1": Form("int", 8, 32),
    "Q5_K": Form("int", 8, 32),
    "Q6_K": Form("int", 8, 16),
    "Q8_0": Form("int", 8, 32),
}
"""Codes of 5 and 6 bits take a byte each."""

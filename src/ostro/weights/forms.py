"""In what form a stored weight could stay quantised in memory, told from its header. Imports no torch."""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Form(NamedTuple):
    kind: Literal["int", "float"]
    """Integers with scales for groups of inputs, or 8-bit floats with scales."""
    bits: int
    group: int
    """Inputs that share a scale."""


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

"""In which of GGUF's types a stored matrix is packed. Imports no torch and no arrays."""

from ostro.formats.gguf_header import GGML_TYPES

_FLOATS = ("F32", "F16", "BF16")
KINDS = {each.name: kind for kind, each in GGML_TYPES.items() if each.block_size > 1 or each.name in _FLOATS}
"""Formats that are packed as they are stored, as far as there are kernels for them, by GGUF's numbers."""
FLOAT32 = KINDS["F32"]
# As safetensors names them.
_WIDENED = ("F64", "F8_E4M3", "F8_E5M2")


def kind_of(stored: str) -> int | None:
    """What a format is packed as, by GGUF's number; None where it is no format of floating-point numbers."""
    return FLOAT32 if stored in _WIDENED else KINDS.get(stored)

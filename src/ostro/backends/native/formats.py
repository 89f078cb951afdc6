"""The GGUF type in which a stored matrix is packed. Imports no torch and no numpy."""

from ostro.formats.gguf_header import GGML_TYPES

_FLOATS = ("F32", "F16", "BF16")
KINDS = {each.name: kind for kind, each in GGML_TYPES.items() if each.block_size > 1 or each.name in _FLOATS}
"""GGUF's number of each format that is packed as stored, if there are kernels for it."""
FLOAT32 = KINDS["F32"]
# safetensors' names.
_WIDENED = ("F64", "F8_E4M3", "F8_E5M2")


def kind_of(stored: str) -> int | None:
    """GGUF's number of the type that a stored format is packed as; None if it is no floating-point format."""
    return FLOAT32 if stored in _WIDENED else KINDS.get(stored)

"""Which weights can be packed: see `packed_words`. Plain arithmetic that needs neither torch nor Triton."""

PAIR_BYTES = 4
"""Bytes of a group's scale and zero point or minimum."""
_LARGEST_BLOCK = 128


def quad_inputs(bits: int) -> int:
    """Inputs in four words."""
    return 128 // bits


def block_inputs(group: int) -> int:
    """Inputs that the tensor cores multiply at a time: as many as possible with one scale, a power of two."""
    return min(_LARGEST_BLOCK, group & -group)


def fits(bits: int, columns: int, group: int) -> bool:
    """Whether rows consist of whole groups, and groups of whole quads."""
    return columns % group == 0 and group % quad_inputs(bits) == 0

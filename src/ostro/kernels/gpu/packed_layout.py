"""Which weights the packed form takes: see `packed_words`. Plain arithmetic that needs neither torch nor Triton."""

SLICE = 16
"""Words of a block, and the inputs next to one another that have the same place in them."""
PAIR_BYTES = 4
"""Of a group's scale and zero point or minimum."""
# So many words of a row fit a thread's registers (`packed_vector`), of all threads of a program together.
_MOST_WORDS = 8192


def block_inputs(bits: int) -> int:
    """Inputs in a block of words."""
    return SLICE * (32 // bits)


def fits(bits: int, columns: int, group: int) -> bool:
    """Whether rows consist of whole blocks and whole groups, and one of these of whole ones of the other."""
    block = block_inputs(bits)
    return (
        columns % block == 0
        and columns % group == 0
        and (group % block == 0 or (block % group == 0 and group * 4 >= block))
        and columns * bits // 32 <= _MOST_WORDS
    )

"""What a request is routed by. Knows text; knows no replicas and no format of requests."""

import hashlib
from dataclasses import dataclass

BLOCK = 128
"""Characters per block: about two pages of tokens on a CPU, half a page on a GPU."""
MOST_BLOCKS = 512
DIGEST_BYTES = 8


def _levels() -> tuple[int, ...]:
    """Prefix lengths, in blocks: every one at first, then each a quarter longer."""
    levels = [1]
    while levels[-1] < MOST_BLOCKS:
        levels.append(levels[-1] + max(1, levels[-1] // 4))
    return tuple(levels)


_LEVELS_UP_TO = tuple(
    (*(level for level in _levels() if level < count), *([count] if count else [])) for count in range(MOST_BLOCKS + 1)
)


@dataclass(frozen=True, slots=True)
class Key:
    """The model, and the prompt as a chain of digests, each over everything before it."""

    model: str
    blocks: tuple[bytes, ...] = ()
    num_history: int = 0
    """Blocks that an earlier request may have left in a cache: those before the model's last answer."""


def blocks_of(text: str, salt: str = "") -> tuple[bytes, ...]:
    """The chain of digests of a text's full blocks: texts share as many digests as their common prefix has blocks."""
    last, blocks = hashlib.blake2b(salt.encode(errors="replace"), digest_size=DIGEST_BYTES).digest(), []
    for begin in range(0, min(len(text) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        block = text[begin : begin + BLOCK].encode(errors="replace")
        last = hashlib.blake2b(last + block, digest_size=DIGEST_BYTES).digest()
        blocks.append(last)
    return tuple(blocks)


def levels_of(num_blocks: int) -> tuple[int, ...]:
    """The lengths, in blocks, at which the prefixes of a prompt are remembered, ascending: at most 28, the last being
    the prompt's own.
    """
    return _LEVELS_UP_TO[min(num_blocks, MOST_BLOCKS)]

"""The memory that plain attention takes beside the KV cache. Needs no torch."""

from math import isqrt

BLOCK_BYTES = 256 << 20
"""Memory for the scores of one block of queries, and for what is computed from them."""
SCORE_BYTES = 16
"""Bytes per score at the peak: in float32 before and after the softmax, and in the model's dtype."""


def queries_at_once(heads: int, before: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many queries of `heads` heads form one block, if they attend to each other and to `before` earlier keys."""
    most = block_bytes // (SCORE_BYTES * heads)
    # The largest with rows * (before + rows) <= most.
    return max(1, (isqrt(before * before + 4 * most) - before) // 2)


def most_block_bytes(heads: int, keys: int) -> int:
    """The most that a block takes: a single query may attend to more keys than `BLOCK_BYTES` has room for."""
    return max(BLOCK_BYTES, SCORE_BYTES * heads * keys)

"""How prompts are pooled, chunk by chunk, and which text of a pair a token belongs to. Imports no torch."""

from typing import NamedTuple

from ostro.engine.batch import Chunk
from ostro.weights import Pooling


class PooledRows(NamedTuple):
    rows: slice
    """The rows of a chunk to sum; may be empty."""
    divisor: int
    """The divisor of their sum."""


def pooled_rows(pooling: Pooling | None, chunk: Chunk) -> PooledRows:
    """The chunk's contribution to the sequence's vector, which is the sum over all its chunks."""
    assert pooling is not None, "the model does not embed"
    if pooling.mode == "mean":
        return PooledRows(slice(None), chunk.seq.num_tokens)
    if pooling.mode == "cls" and chunk.start == 0:
        return PooledRows(slice(0, 1), 1)
    if pooling.mode == "lasttoken" and chunk.end == chunk.seq.num_tokens:
        return PooledRows(slice(-1, None), 1)
    return PooledRows(slice(0, 0), 1)


def token_types(chunk: Chunk) -> list[int]:
    """Zeros for the first text's tokens, ones for the second's."""
    second = chunk.seq.request.second_at
    return [0] * chunk.length if not second else [0] * second + [1] * (chunk.length - second)

"""From the hidden states of a prompt to its one vector, chunk by chunk. Imports no torch."""

from typing import NamedTuple

from ostro.engine.batch import Chunk
from ostro.weights import Pooling


class PooledRows(NamedTuple):
    rows: slice
    """The rows of a chunk whose sum counts; perhaps none."""
    divisor: int
    """What their sum is divided by."""


def pooled_rows(pooling: Pooling | None, chunk: Chunk) -> PooledRows:
    """The chunk's share of the sequence's vector: the shares of all its chunks add up to it."""
    assert pooling is not None, "the model does not embed"
    if pooling.mode == "mean":
        return PooledRows(slice(None), chunk.seq.num_tokens)
    if pooling.mode == "cls" and chunk.start == 0:
        return PooledRows(slice(0, 1), 1)
    if pooling.mode == "lasttoken" and chunk.end == chunk.seq.num_tokens:
        return PooledRows(slice(-1, None), 1)
    return PooledRows(slice(0, 0), 1)

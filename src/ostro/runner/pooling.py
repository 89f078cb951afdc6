"""From the hidden states of a prompt to its one vector, chunk by chunk."""

import torch
from torch import Tensor

from ostro.engine.batch import Chunk
from ostro.weights import Pooling


def pooled_share(pooling: Pooling | None, chunk: Chunk, hidden: Tensor) -> Tensor:
    """The chunk's share of the sequence's vector: the shares of all its chunks add up to it."""
    assert pooling is not None, "the model does not embed"
    last = chunk.end == chunk.seq.num_tokens
    if pooling.mode == "mean":
        return hidden.sum(0) / chunk.seq.num_tokens
    if pooling.mode == "cls" and chunk.start == 0:
        return hidden[0]
    if pooling.mode == "lasttoken" and last:
        return hidden[-1]
    return torch.zeros_like(hidden[0])

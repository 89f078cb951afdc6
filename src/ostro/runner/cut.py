"""How a model is divided over ranks: what each one holds, and which numbers of ranks are possible. Knows no library."""

from dataclasses import dataclass

from ostro.errors import BadRequest
from ostro.models.architecture import Architecture

BLOCK = 128
"""Tokens that race as one when a token is drawn (`runner.distribution`): no rank holds part of a block."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What one of `ranks` equal ranks holds of a model."""

    ranks: int
    heads: int
    kv_heads: int
    kv_copies: int
    """Ranks that share a KV head, if there are more ranks than KV heads; each keeps a copy of it."""
    vocab: int
    """Rows of the embedding and head, with those that pad the vocabulary to whole blocks."""

    def first_kv_head(self, rank: int) -> int:
        return rank * self.kv_heads // self.kv_copies


def cut(described: Architecture, ranks: int) -> Cut:
    """Divides a model over `ranks` ranks. Raises BadRequest, naming what does not divide and which numbers do."""
    shape = described.shape
    if problem := _problem(described, ranks):
        fitting = ", ".join(str(n) for n in range(1, shape.num_heads + 1) if _problem(described, n) is None)
        raise BadRequest(
            f"tensor_parallel is {ranks}, but {problem}. Set it to one of {fitting}.", param="tensor_parallel"
        )
    return Cut(
        ranks=ranks,
        heads=shape.num_heads // ranks,
        kv_heads=max(1, shape.num_kv_heads // ranks),
        kv_copies=max(1, ranks // shape.num_kv_heads),
        vocab=-(-shape.vocab_size // (BLOCK * ranks)) * BLOCK,
    )


def _problem(described: Architecture, ranks: int) -> str | None:
    heads, kv_heads = described.shape.num_heads, described.shape.num_kv_heads
    if ranks < 1:
        return "there must be at least one device"
    if heads % ranks:
        return f"the model's {heads} attention heads do not divide by it"
    if kv_heads % ranks and ranks % kv_heads:
        return f"it is neither a divisor nor a multiple of the model's {kv_heads} KV heads"
    for inner in sorted({layer.mlp.down.columns for layer in described.layers}):
        if inner % ranks:
            return f"the MLP's width, {inner}, does not divide by it"
    return None

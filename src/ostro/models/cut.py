"""How a model is divided over ranks: what each one holds, and which numbers of ranks are possible. Knows no library."""

from dataclasses import dataclass, replace

from ostro.errors import BadRequest, UnsupportedModel
from ostro.models.architecture import MLP, Architecture, Layer, ModelShape, Projection
from ostro.models.description import Description, plain_decoder

BLOCK = 128
"""Tokens per block of a draw (`backends.sampling.distribution`): no rank holds part of a block."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What one of `ranks` equal ranks holds of a model."""

    ranks: int
    heads: int
    kv_heads: int
    kv_copies: int
    """Ranks that share a KV head, if there are more ranks than KV heads; each keeps a copy of it."""
    vocab: int
    """Rows of the embedding and head, including padding of the vocabulary to whole blocks."""

    def first_kv_head(self, rank: int) -> int:
        return rank * self.kv_heads // self.kv_copies

    def shape(self, whole: ModelShape) -> ModelShape:
        """The shape of a rank's part: it has fewer heads, and knows all tokens."""
        return replace(whole, num_heads=self.heads, num_kv_heads=self.kv_heads)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a matrix."""

    rows: tuple[range, ...]
    """Rows of the whole matrix, one below the other."""
    columns: range
    padding: int = 0
    """Unused rows below them, which make all ranks' matrices equally large."""
    summed: bool = False
    """Whether the ranks' products have to be summed, because the inputs are divided."""


def divisible(described: Description) -> Architecture:
    """The description of a model that can be divided. Raises UnsupportedModel for another kind."""
    found = _whole_or_divisible(described)
    if isinstance(found, str):
        raise UnsupportedModel(f"This model does not run on several devices: {found}. Leave out tensor_parallel.")
    return found


def most_ranks(described: Description, devices: int) -> int:
    """The largest number of ranks, at most `devices`, that the model can be divided over."""
    found = _whole_or_divisible(described)
    return 1 if isinstance(found, str) else max(ranks for ranks in possible_ranks(found) if ranks <= devices)


def _whole_or_divisible(described: Description) -> Architecture | str:
    """The description of a model that can be divided, or the reason why it stays whole."""
    found = plain_decoder(described)
    if isinstance(found, str):
        return found
    return "it is a mixture of experts" if found.has_experts else found


def possible_ranks(described: Architecture) -> list[int]:
    """All numbers of ranks that the model can be divided over, from 1."""
    return [ranks for ranks in range(1, described.shape.num_heads + 1) if _problem(described, ranks) is None]


def cut(described: Description, ranks: int) -> Cut:
    """Divides a model over `ranks` ranks. Raises BadRequest, naming what does not divide and which numbers do, or like
    `divisible`.
    """
    described = divisible(described)
    shape = described.shape
    if problem := _problem(described, ranks):
        fitting = ", ".join(map(str, possible_ranks(described)))
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


def qkv_share(shape: ModelShape, projection: Projection, cut: Cut, rank: int) -> Share:
    """A rank's share of a layer's fused [q|k|v] matrix: its heads, with the KV heads that they attend to."""
    first = shape.num_heads + cut.first_kv_head(rank)
    heads = (
        range(rank * cut.heads, (rank + 1) * cut.heads),
        range(first, first + cut.kv_heads),
        range(first + shape.num_kv_heads, first + shape.num_kv_heads + cut.kv_heads),
    )
    width = shape.head_dim
    return Share(tuple(range(own.start * width, own.stop * width) for own in heads), range(projection.columns))


def up_share(mlp: MLP, cut: Cut, rank: int) -> Share:
    """A rank's share of an MLP's fused [gate|up] matrix, or of the up matrix of an MLP without a gate."""
    own = _equal_part(mlp.down.columns, cut, rank)
    second = range(own.start + mlp.down.columns, own.stop + mlp.down.columns)
    return Share((own, second) if mlp.gated else (own,), range(mlp.up.columns))


def input_share(projection: Projection, cut: Cut, rank: int) -> Share:
    """A rank's share of a matrix whose inputs are divided over ranks: attention's output, an MLP's down projection."""
    return Share((range(projection.rows),), _equal_part(projection.columns, cut, rank), summed=True)


def layer_shares(shape: ModelShape, layer: Layer, cut: Cut, rank: int) -> tuple[Share, Share, Share, Share]:
    """A rank's shares of the layer's projections, in order."""
    attention, mlp = layer.attention, layer.dense
    return (
        qkv_share(shape, attention.qkv, cut, rank),
        input_share(attention.output, cut, rank),
        up_share(mlp, cut, rank),
        input_share(mlp.down, cut, rank),
    )


def vocabulary_share(shape: ModelShape, cut: Cut, rank: int) -> Share:
    """A rank's share of the embedding or head. The last ranks may hold padding only."""
    first = min(rank * cut.vocab, shape.vocab_size)
    own = range(first, min(first + cut.vocab, shape.vocab_size))
    return Share((own,), range(shape.hidden_size), padding=cut.vocab - len(own))


def part_rows(projection: Projection, share: Share) -> list[tuple[range, ...]]:
    """The share's rows of each part of the projection, numbered within the part."""
    found, start = [], 0
    for part in projection.parts:
        own = (_within(rows, start, start + part.rows) for rows in share.rows)
        found.append(tuple(rows for rows in own if rows) or (range(0),))
        start += part.rows
    return found


def rank_shapes(described: Architecture, cut: Cut) -> dict[str, tuple[int, ...]]:
    """The shapes that a rank keeps of the tensors in a checkpoint, with padding."""
    shape = described.shape
    shapes = {tensor.name: tensor.shape for tensor in described.tensors()}
    matrices = [described.embedding.name, *([] if described.head is None else [described.head.name])]
    shapes |= {f"{name}.weight": (cut.vocab, shape.hidden_size) for name in matrices if name is not None}
    for layer in described.layers:
        for projection, share in zip(layer.projections, layer_shares(shape, layer, cut, 0), strict=True):
            shapes |= _projection_shapes(projection, share)
        if (norm := layer.attention.qk_norm) is not None and norm.over == "width":
            shapes[f"{norm.query.name}.weight"] = (cut.heads * shape.head_dim,)
            shapes[f"{norm.key.name}.weight"] = (cut.kv_heads * shape.head_dim,)
    return shapes


def _projection_shapes(projection: Projection, share: Share) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for (name, *_), ranges in zip(projection.parts, part_rows(projection, share), strict=True):
        rows, columns = sum(map(len, ranges)), len(share.columns)
        shapes[f"{name}.weight"] = (columns, rows) if projection.transposed else (rows, columns)
        if projection.bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _within(own: range, start: int, stop: int) -> range:
    """The part of `own` in start .. stop, counted from start; may be empty."""
    return range(max(own.start, start) - start, max(min(own.stop, stop), start) - start)


def _equal_part(size: int, cut: Cut, rank: int) -> range:
    each = size // cut.ranks
    return range(rank * each, (rank + 1) * each)


def _problem(described: Architecture, ranks: int) -> str | None:
    heads, kv_heads = described.shape.num_heads, described.shape.num_kv_heads
    if ranks < 1:
        return "there must be at least one device"
    if heads % ranks:
        return f"the model's {heads} attention heads do not divide by it"
    if kv_heads % ranks and ranks % kv_heads:
        return f"it is neither a divisor nor a multiple of the model's {kv_heads} KV heads"
    for inner in sorted({layer.dense.down.columns for layer in described.layers}):
        if inner % ranks:
            return f"the MLP's width, {inner}, does not divide by it"
    return None

"""How a model is divided over ranks: what each one holds, and which numbers of ranks are possible. Knows no library."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

from ostro.errors import BadRequest, UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Architecture,
    Attention,
    Convolution,
    GatedDelta,
    Layer,
    Mamba2,
    ModelShape,
    Projection,
    Recurrent,
    ShortConvolution,
    State,
)
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
        layers = tuple(own if not own.kv else own._replace(kv=self.kv_heads) for own in whole.layer_heads)
        return replace(whole, num_heads=self.heads, num_kv_heads=self.kv_heads, layer_heads=layers)

    def mixer(self, whole: Recurrent) -> Recurrent:
        """A rank's part of a mixer: it has fewer heads or channels, and its state is as much smaller. Projections,
        names and norms are still those of the whole: see `recurrent_shares`.
        """
        match whole:
            case GatedDelta():
                return self.delta(whole)
            case Mamba2():
                return self.mamba(whole)
            case ShortConvolution():
                return replace(whole, conv=self._convolution(whole))
            case unknown:
                assert_never(unknown)

    def delta(self, whole: GatedDelta) -> GatedDelta:
        heads = whole.key_heads // self.ranks, whole.value_heads // self.ranks
        return replace(whole, conv=self._convolution(whole), key_heads=heads[0], value_heads=heads[1])

    def mamba(self, whole: Mamba2) -> Mamba2:
        groups, normed = (max(1, each // self.ranks) for each in (whole.groups, whole.norm_groups))
        heads = whole.heads // self.ranks
        return replace(whole, conv=self._convolution(whole), heads=heads, groups=groups, norm_groups=normed)

    def _convolution(self, whole: Recurrent) -> Convolution:
        return replace(whole.conv, channels=sum(map(len, recurrent_shares(whole, self, 0).channels)))

    def states(self, described: Architecture) -> tuple[State | None, ...]:
        """What each layer keeps of a sequence on a rank; see `Architecture.states`."""
        mixers = (layer.recurrent for layer in described.layers)
        found = tuple(None if mixer is None else self.mixer(mixer).state for mixer in mixers)
        return found if any(found) else ()


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a matrix."""

    rows: tuple[range, ...]
    """Rows of the whole matrix, one below the other."""
    columns: tuple[range, ...]
    """Columns of the whole matrix, side by side."""
    padding: int = 0
    """Unused rows below them, which make all ranks' matrices equally large."""
    summed: bool = False
    """Whether the ranks' products have to be summed, because the inputs are divided."""

    @property
    def num_columns(self) -> int:
        return sum(map(len, self.columns))


class RecurrentShares(NamedTuple):
    """What one rank holds of a recurrent mixer."""

    channels: tuple[range, ...]
    """Channels of the convolution, in the rank's order."""
    heads: tuple[range, ...]
    """Heads with a matrix, as the vectors of a number per head have them; empty without matrices."""
    projections: tuple[Share, ...]
    """The shares of the mixer's projections, in order."""


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
    found = plain_decoder(described, hybrid=True)
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


def qkv_share(shape: ModelShape, attention: Attention, cut: Cut, rank: int) -> Share:
    """A rank's share of a layer's fused [q|k|v] matrix, or [gate|q|k|v] if gated: its heads, with the KV heads that
    they attend to.
    """
    first, own = shape.num_heads + cut.first_kv_head(rank), range(rank * cut.heads, (rank + 1) * cut.heads)
    heads = [own, range(first, first + cut.kv_heads)]
    heads.append(_moved(heads[1], shape.num_kv_heads))
    if attention.gated:
        heads = [own, *(_moved(each, shape.num_heads) for each in heads)]
    return Share(_spread(heads, shape.head_dim), (range(attention.qkv.columns),))


def up_share(mlp: MLP, cut: Cut, rank: int) -> Share:
    """A rank's share of an MLP's fused [gate|up] matrix, or of the up matrix of an MLP without a gate."""
    own = _equal_part(mlp.down.columns, cut, rank)
    second = range(own.start + mlp.down.columns, own.stop + mlp.down.columns)
    return Share((own, second) if mlp.gated else (own,), (range(mlp.up.columns),))


def input_share(projection: Projection, cut: Cut, rank: int) -> Share:
    """A rank's share of a matrix whose inputs are divided over ranks: attention's output, an MLP's down projection."""
    return _summed(projection, (_equal_part(projection.columns, cut, rank),))


def recurrent_shares(mixer: Recurrent, cut: Cut, rank: int) -> RecurrentShares:
    """A rank's heads, or its channels of a short convolution, with all that they read."""
    match mixer:
        case GatedDelta():
            return _delta_shares(mixer, cut, rank)
        case Mamba2():
            return _mamba_shares(mixer, cut, rank)
        case ShortConvolution():
            own = _equal_part(mixer.conv.channels, cut, rank)
            inputs = tuple(_moved(own, part * mixer.conv.channels) for part in range(3))
            return RecurrentShares((own,), (), (_of_rows(mixer.inputs, inputs), _summed(mixer.output, (own,))))
        case unknown:
            assert_never(unknown)


def _delta_shares(mixer: GatedDelta, cut: Cut, rank: int) -> RecurrentShares:
    """Key heads with their value heads."""
    own, key_heads = _equal_part(mixer.key_heads, cut, rank), mixer.key_heads
    heads: Sequence[range] = (_equal_part(mixer.value_heads, cut, rank),)
    if mixer.head_map == "tiled":
        heads = [_moved(own, first) for first in range(0, mixer.value_heads, key_heads)]
    keys, values = key_heads * mixer.key_dim, _spread(heads, mixer.value_dim)
    channels = (
        *_spread((own, _moved(own, key_heads)), mixer.key_dim),
        *(_moved(each, 2 * keys) for each in values),
    )
    z = (_moved(each, mixer.conv.channels) for each in values)
    gates = (*heads, *(_moved(each, mixer.value_heads) for each in heads))
    projections = (
        _of_rows(mixer.inputs, (*channels, *z)),
        _of_rows(mixer.gates, gates),
        _summed(mixer.output, values),
    )
    return RecurrentShares(channels, tuple(heads), projections)


def _mamba_shares(mixer: Mamba2, cut: Cut, rank: int) -> RecurrentShares:
    """Heads with their groups, of which several ranks may share one."""
    heads = _equal_part(mixer.heads, cut, rank)
    first = rank * mixer.groups // cut.ranks
    groups = range(first, first + max(1, mixer.groups // cut.ranks))
    [own] = _spread((heads,), mixer.head_dim)
    [b, c] = _spread((groups, _moved(groups, mixer.groups)), mixer.state_size)
    channels = (own, _moved(b, mixer.width), _moved(c, mixer.width))
    convolved = (_moved(each, mixer.width) for each in channels)
    rows = (own, *convolved, _moved(heads, mixer.width + mixer.conv.channels))
    return RecurrentShares(channels, (heads,), (_of_rows(mixer.inputs, rows), _summed(mixer.output, (own,))))


def _of_rows(projection: Projection, rows: tuple[range, ...]) -> Share:
    return Share(rows, (range(projection.columns),))


def _summed(projection: Projection, columns: tuple[range, ...]) -> Share:
    return Share((range(projection.rows),), columns, summed=True)


def layer_shares(shape: ModelShape, layer: Layer, cut: Cut, rank: int) -> tuple[Share, ...]:
    """A rank's shares of the layer's projections, in order."""
    return tuple(_layer_shares(shape, layer, cut, rank))


def _layer_shares(shape: ModelShape, layer: Layer, cut: Cut, rank: int) -> Iterator[Share]:
    if (attention := layer.attends) is not None:
        yield qkv_share(shape, attention, cut, rank)
        yield input_share(attention.output, cut, rank)
    if layer.recurrent is not None:
        yield from recurrent_shares(layer.recurrent, cut, rank).projections
    if layer.mlp is not None:
        yield up_share(layer.dense, cut, rank)
        yield input_share(layer.dense.down, cut, rank)


def vocabulary_share(shape: ModelShape, cut: Cut, rank: int) -> Share:
    """A rank's share of the embedding or head. The last ranks may hold padding only."""
    first = min(rank * cut.vocab, shape.vocab_size)
    own = range(first, min(first + cut.vocab, shape.vocab_size))
    return Share((own,), (range(shape.hidden_size),), padding=cut.vocab - len(own))


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
        if layer.attends is not None and (norm := layer.attends.qk_norm) is not None and norm.over == "width":
            shapes[f"{norm.query.name}.weight"] = (cut.heads * shape.head_dim,)
            shapes[f"{norm.key.name}.weight"] = (cut.kv_heads * shape.head_dim,)
        if layer.recurrent is not None:
            shapes |= _recurrent_shapes(cut.mixer(layer.recurrent))
    return shapes


def _recurrent_shapes(own: Recurrent) -> dict[str, tuple[int, ...]]:
    """Those of a rank's part of a mixer, but for its projections and norms that are copied."""
    shapes = {tensor.name: tensor.shape for tensor in own.conv.tensors()}
    match own:
        case GatedDelta():
            shapes |= dict.fromkeys((own.decay, own.decay_bias), (own.value_heads,))
        case Mamba2():
            shapes |= dict.fromkeys((own.decay, own.step_bias, own.skip), (own.heads,))
            if own.norm is not None:
                shapes[f"{own.norm.name}.weight"] = (own.width,)
    return shapes


def _projection_shapes(projection: Projection, share: Share) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for (name, *_), ranges in zip(projection.parts, part_rows(projection, share), strict=True):
        rows, columns = sum(map(len, ranges)), share.num_columns
        shapes[f"{name}.weight"] = (columns, rows) if projection.transposed else (rows, columns)
        if projection.bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _within(own: range, start: int, stop: int) -> range:
    """The part of `own` in start .. stop, counted from start; may be empty."""
    return range(max(own.start, start) - start, max(min(own.stop, stop), start) - start)


def _moved(own: range, by: int) -> range:
    return range(own.start + by, own.stop + by)


def _spread(heads: Sequence[range], width: int) -> tuple[range, ...]:
    """The heads' rows."""
    return tuple(range(own.start * width, own.stop * width) for own in heads)


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
    for inner in sorted({layer.dense.down.columns for layer in described.layers if layer.mlp is not None}):
        if inner % ranks:
            return f"the MLP's width, {inner}, does not divide by it"
    mixers = (layer.recurrent for layer in described.layers if layer.recurrent is not None)
    return next(filter(None, (_recurrent_problem(mixer, ranks) for mixer in mixers)), None)


def _recurrent_problem(mixer: Recurrent, ranks: int) -> str | None:
    match mixer:
        case GatedDelta(key_heads=heads) if heads % ranks:
            return f"the {heads} key heads of the model's delta nets do not divide by it"
        case Mamba2(heads=heads) if heads % ranks:
            return f"the {heads} heads of the model's Mamba-2 layers do not divide by it"
        case Mamba2():
            for groups in (mixer.groups, mixer.norm_groups):
                if groups % ranks and ranks % groups:
                    return f"it is neither a divisor nor a multiple of the {groups} groups of Mamba-2 layers"
        case ShortConvolution(conv=conv) if conv.channels % ranks:
            return f"the {conv.channels} channels of the model's convolutions do not divide by it"
    return None

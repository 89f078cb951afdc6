"""What a rank holds of a model: its vectors in one array, the sizes of its matrices, the tables of adapters, and the
width of keys and values. Imports no JAX, so that planning can read it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ostro.errors import Unsupported, UnsupportedModel
from ostro.models.architecture import (
    Architecture,
    Attention,
    GatedDelta,
    Layer,
    Mamba2,
    MixerPair,
    Norm,
    Projection,
    Recurrent,
    State,
)
from ostro.models.cut import Cut, RecurrentShares, layer_shares, recurrent_shares
from ostro.models.description import Description, plain_decoder


def jax_architecture(described: Description) -> Architecture:
    """The description of a model that JAX can run. Raises UnsupportedModel for another kind."""
    found = plain_decoder(described, hybrid=True)
    reason = found if isinstance(found, str) else _why_refused(found)
    if not isinstance(found, str) and reason is None:
        return found
    raise UnsupportedModel(f"The JAX backend cannot run this model: {reason}. Use --backend torch.")


def _why_refused(described: Architecture) -> str | None:
    if described.has_experts:
        return "it is a mixture of experts"
    if len({state for state in described.states if state is not None}) > 1:
        return "its layers keep states of several kinds"
    return next(filter(None, map(_why_refused_layer, described.layers)), None)


def _why_refused_layer(layer: Layer) -> str | None:
    if layer.mixer is None or layer.mlp is None:
        return "its layers have a mixer or an MLP, not both"
    if isinstance(layer.mixer, MixerPair):
        return "its layers attend and keep a state at once"
    if isinstance(layer.mixer, Mamba2) and layer.mixer.norm_groups > 1:
        return "its Mamba-2 layers norm groups of their outputs"
    if layer.dense.activation == "relu2":
        return "its MLPs square their ReLUs"
    if any(projection.is_scaled for projection in layer.projections):
        return "its matrices are scaled on loading"
    return None


def check_adapters(described: Architecture, adapters: Collection[object]) -> None:
    """Raises Unsupported for adapters of a model with states."""
    if adapters and described.states:
        raise Unsupported(
            "With JAX, a model whose layers keep a recurrent state takes no adapters. Leave them out, or use "
            "--backend torch.",
            param="adapters",
        )


def rank_state(described: Architecture, cut: Cut) -> State | None:
    """What a rank keeps of a sequence in each recurrent layer; None for a model without such."""
    return next((state for state in cut.states(described) if state is not None), None)


def num_stateful(described: Architecture) -> int:
    """The number of layers that keep a state. All others keep keys and values."""
    return sum(layer.recurrent is not None for layer in described.layers)


class Vector(NamedTuple):
    """Where a vector lies in a rank's array of vectors."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """The places of a model's vectors by name. A projection's bias has the name of its first part."""

    places: dict[str, Vector]
    total: int

    @classmethod
    def of(cls, described: Architecture, cut: Cut) -> "VectorLayout":
        places: dict[str, Vector] = {}
        total = 0
        for name, size in _vector_sizes(described, cut):
            places[name] = Vector(total, size)
            total += size
        return cls(places, total)


def bias_name(projection: Projection) -> str:
    return f"{projection.parts[0].name}.bias"


def whole_norms(described: Architecture) -> Iterator[Norm]:
    """All norms whose weights every rank holds whole."""
    for layer in described.layers:
        yield from layer.norms
        if layer.attends is not None and (qk_norm := layer.attends.qk_norm) is not None and qk_norm.over == "head":
            yield from (qk_norm.query, qk_norm.key)
    yield described.norm


def width_norms(described: Architecture) -> Iterator[Attention]:
    for layer in described.layers:
        if layer.attends is not None and (qk_norm := layer.attends.qk_norm) is not None and qk_norm.over == "width":
            yield layer.attends


def head_vectors(mixer: Recurrent, shares: RecurrentShares) -> Iterator[tuple[str, tuple[range, ...]]]:
    """A recurrent mixer's stored vectors, but for its filters, and the entries of them that a rank holds."""
    if mixer.conv.bias:
        yield f"{mixer.conv.name}.bias", shares.channels
    match mixer:
        case GatedDelta():
            yield mixer.decay, shares.heads
            yield mixer.decay_bias, shares.heads
            yield f"{mixer.norm.name}.weight", (range(mixer.norm.size),)
        case Mamba2():
            yield from ((name, shares.heads) for name in (mixer.decay, mixer.step_bias, mixer.skip))
            if mixer.norm is not None:
                yield f"{mixer.norm.name}.weight", shares.channels[:1]


def _vector_sizes(described: Architecture, cut: Cut) -> Iterator[tuple[str, int]]:
    head_dim = described.shape.head_dim
    for norm in whole_norms(described):
        yield from ((tensor.name, norm.size) for tensor in norm.tensors())
    for attention in width_norms(described):
        assert attention.qk_norm is not None
        yield f"{attention.qk_norm.query.name}.weight", cut.heads * head_dim
        yield f"{attention.qk_norm.key.name}.weight", cut.kv_heads * head_dim
    for layer in described.layers:
        shares = zip(layer.projections, layer_shares(described.shape, layer, cut, 0), strict=True)
        yield from ((bias_name(each), sum(map(len, share.rows))) for each, share in shares if each.bias)
        if (mixer := layer.recurrent) is not None:
            own = recurrent_shares(mixer, cut, 0)
            yield f"{mixer.conv.name}.weight", mixer.conv.taps * sum(map(len, own.channels))
            yield from ((name, sum(map(len, entries))) for name, entries in head_vectors(mixer, own))


def matrix_values(described: Architecture, cut: Cut) -> int:
    """How many numbers a rank's matrices have, including copied KV heads and the vocabulary's padding."""
    shape, head = described.shape, described.head
    tables = 1 if head is None or head.is_tied else 2
    values = tables * cut.vocab * shape.hidden_size
    if described.embedding.positions is not None:
        values += described.embedding.positions.rows * shape.hidden_size
    shares = (share for layer in described.layers for share in layer_shares(shape, layer, cut, 0))
    return values + sum(sum(map(len, share.rows)) * share.num_columns for share in shares)


# Adapters

_NARROWEST = 8


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Where adapters lie in their tables, which are as wide as the ranks of all adapters together. Each projection of a
    layer has a table, equally wide in all layers; zeros fill it where an adapter has a lower rank or changes nothing.
    """

    starts: tuple[Mapping[str, int], ...]
    """By the number of the projection: where each adapter that changes it begins."""
    widths: tuple[int, ...]
    """By the number of the projection; 0 if no adapter changes it. Powers of two, so that adding an adapter often
    changes no program.
    """
    numbers: Mapping[str, int]
    """Each adapter's number, from 1 on; 0 means no adapter."""

    @classmethod
    def of(cls, described: Architecture, ranks: Mapping[str, Mapping[str, int]]) -> "AdapterLayout":
        """Built from each adapter's ranks, by the names of the parts that it changes."""
        # Layers of models that take no adapters may differ in their projections.
        if not ranks:
            return cls((), (), {})
        starts: list[dict[str, int]] = []
        widths: list[int] = []
        for projections in zip(*(layer.projections for layer in described.layers), strict=True):
            own, total = dict[str, int](), 0
            for adapter, by_part in ranks.items():
                width = max(sum(by_part.get(part.name, 0) for part in each.parts) for each in projections)
                if width:
                    own[adapter] = total
                    total += width
            starts.append(own)
            widths.append(max(_NARROWEST, 1 << (total - 1).bit_length()) if total else 0)
        return cls(tuple(starts), tuple(widths), {name: number for number, name in enumerate(ranks, 1)})

    def number(self, adapter: str | None) -> int:
        return 0 if adapter is None else self.numbers[adapter]

    def owners(self, projection: int) -> list[int]:
        """The number of the adapter that each entry of a table's width belongs to. Entries that pad it, or that an
        adapter leaves empty, hold zeros and may belong to any.
        """
        owners = [0] * self.widths[projection]
        for adapter, start in self.starts[projection].items():
            owners[start:] = [self.numbers[adapter]] * (len(owners) - start)
        return owners

    def values(self, described: Architecture, cut: Cut) -> int:
        """How many numbers a rank's tables have."""
        if not self.widths:
            return 0
        return sum(
            width * (share.num_columns + sum(map(len, share.rows)))
            for layer in described.layers
            for width, share in zip(self.widths, layer_shares(described.shape, layer, cut, 0), strict=True)
        )


# Pages on TPUs

_LANES = 128
"""Numbers in a row of a TPU's register."""
_REGISTER_ROWS = 8
_ROW_BYTES = 4
"""Bytes per place in a row; narrower numbers share one."""


def fits_tpu_kernel(kv_heads: int, itemsize: int) -> bool:
    """Whether a rank's KV heads suit the kernel of `tpu_attention`: a token's keys and values must fill registers."""
    rows, rest = divmod(2 * kv_heads * itemsize, _ROW_BYTES)
    return rest == 0 and (rows in (1, 2, 4) or rows % _REGISTER_ROWS == 0)


def in_whole_rows(head_dim: int) -> int:
    """The width of a head, padded with zeros to whole rows as the kernel requires."""
    return -(-head_dim // _LANES) * _LANES

"""A checkpoint's tensors as arrays on a mesh: each rank gets its own rows and columns. Knows no programs.

Matrices of one input are fused per rank ([q|k|v], [gate|up]), so that a rank's part is contiguous. All vectors (norms,
biases) are one array per rank, because each argument of a program makes launching it slower.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostro.backends.jax.layout import VectorLayout, bias_name, head_vectors, whole_norms, width_norms
from ostro.backends.jax.mesh import AXIS
from ostro.models.architecture import Architecture, Attention, GatedDelta, Layer, Projection, Recurrent, StoredTensor
from ostro.models.cut import Cut, RecurrentShares, Share, layer_shares, qkv_share, recurrent_shares
from ostro.models.tensor_errors import REDUNDANT, lacking, misshapen, no_place, not_finite, not_floats
from ostro.weights import Checkpoint
from ostro.weights.arrays import Floats
from ostro.weights.slices import SlicedWeight

Rows = npt.NDArray[np.intp]
Slices = tuple[slice, ...]
T = TypeVar("T", bound=np.generic)

BY_ROWS = PartitionSpec(AXIS, None)
BY_COLUMNS = PartitionSpec(None, AXIS)
COPIED = PartitionSpec()


class LayerWeights(NamedTuple):
    """A layer's matrices, [out, in]; also their specs."""

    inputs: Any
    """The mixer's: of attention, queries, keys and values."""
    output: Any
    up: Any
    down: Any
    gates: Any = None
    """None but for a delta net."""


class Weights(NamedTuple):
    """All of a model's arrays; also their specs."""

    vectors: Any
    """[ranks, total]: see `VectorLayout`."""
    embedding: Any
    positions: Any
    """None without learned positions."""
    head: Any
    """None if it is tied or absent."""
    layers: tuple[LayerWeights, ...]

    @property
    def head_matrix(self) -> Any:
        return self.embedding if self.head is None else self.head


def weight_specs(described: Architecture) -> Weights:
    """How each array of `Weights` is divided over the mesh."""
    untied = described.head is not None and not described.head.is_tied
    layer = LayerWeights(inputs=BY_ROWS, output=BY_COLUMNS, up=BY_ROWS, down=BY_COLUMNS)
    deltas = [isinstance(layer.mixer, GatedDelta) for layer in described.layers]
    return Weights(
        vectors=BY_ROWS,
        embedding=BY_ROWS,
        positions=None if described.embedding.positions is None else COPIED,
        head=BY_ROWS if untied else None,
        layers=tuple(layer._replace(gates=BY_ROWS) if is_delta else layer for is_delta in deltas),
    )


def _named_projections(layer: Layer) -> Mapping[str, Projection]:
    """A layer's projections, by the names of their arrays in `LayerWeights`."""
    names = ("inputs", "gates", "output") if isinstance(layer.mixer, GatedDelta) else ("inputs", "output")
    return dict(zip((*names, "up", "down"), layer.projections, strict=True))


def load_weights(
    described: Architecture, checkpoint: Checkpoint, cut: Cut, mesh: Mesh, dtype: npt.DTypeLike
) -> Weights:
    """Reads a model onto the mesh, one rank's piece of one tensor at a time. Vectors are kept in float32, matrices in
    `dtype`.

    Raises BadCheckpoint if a tensor is missing, unknown or misshapen.
    """
    wanted = {tensor.name: tensor for tensor in described.tensors()}
    placed = _Placer(mesh, cut, dtype, dict(_places(described, cut)))
    vectors: dict[str, Floats] = {}
    found: set[str] = set()
    for name, weight in _known(described, checkpoint, wanted):
        if name in found:
            raise no_place(name)
        found.add(name)
        if name in placed.places:
            placed.add(wanted[name], weight)
        else:
            vectors[name] = _vector(wanted[name], weight)
    if missing := wanted.keys() - found:
        raise lacking(missing)
    return placed.weights(described, _vectors(described, vectors, cut, mesh))


def _known(
    described: Architecture, checkpoint: Checkpoint, wanted: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, SlicedWeight]]:
    """The checkpoint's weights by their names in the description, checked against it."""
    for given, weight in checkpoint.slices():
        name = given if given in wanted else f"{described.backbone}.{given}"
        if name in wanted:
            _check(given, weight, wanted[name])
            yield name, weight
        elif not REDUNDANT.fullmatch(given):
            raise no_place(given)


def qkv_rows(described: Architecture, attention: Attention, cut: Cut, rank: int) -> Rows:
    """The rows of the whole [q|k|v] matrix that a rank holds."""
    return numbers_of(qkv_share(described.shape, attention, cut, rank).rows)


def numbers_of(ranges: Sequence[range]) -> Rows:
    """All of a share's rows or columns, in order."""
    return np.concatenate([np.arange(own.start, own.stop) for own in ranges])


def _rank_vectors(
    described: Architecture, vectors: Mapping[str, Floats], cut: Cut, rank: int
) -> Iterator[tuple[str, Floats]]:
    """A rank's part of each vector, by name."""
    num_heads = described.shape.num_heads * described.shape.head_dim
    for norm in whole_norms(described):
        yield from ((tensor.name, vectors[tensor.name]) for tensor in norm.tensors())
    for attention in width_norms(described):
        assert attention.qk_norm is not None
        own = qkv_rows(described, attention, cut, rank)
        both = [vectors[f"{norm.name}.weight"] for norm in (attention.qk_norm.query, attention.qk_norm.key)]
        queries, keys = cut.heads * described.shape.head_dim, cut.kv_heads * described.shape.head_dim
        yield f"{attention.qk_norm.query.name}.weight", both[0][own[:queries]]
        yield f"{attention.qk_norm.key.name}.weight", both[1][own[queries : queries + keys] - num_heads]
    for layer in described.layers:
        shares = layer_shares(described.shape, layer, cut, rank)
        for projection, share in zip(layer.projections, shares, strict=True):
            if projection.bias:
                yield bias_name(projection), _bias(vectors, projection)[numbers_of(share.rows)]
        if (mixer := layer.recurrent) is not None:
            yield from _mixer_vectors(vectors, mixer, recurrent_shares(mixer, cut, rank))


def _mixer_vectors(
    vectors: Mapping[str, Floats], mixer: Recurrent, shares: RecurrentShares
) -> Iterator[tuple[str, Floats]]:
    taps = f"{mixer.conv.name}.weight"
    filters = vectors[taps].reshape(mixer.conv.channels, mixer.conv.taps)
    yield taps, filters[numbers_of(shares.channels)].T.reshape(-1)
    for name, entries in head_vectors(mixer, shares):
        yield name, vectors[name][numbers_of(entries)]


def _bias(vectors: Mapping[str, Floats], projection: Projection) -> Floats:
    return np.concatenate([vectors[f"{part.name}.bias"] for part in projection.parts])


def _vectors(described: Architecture, vectors: Mapping[str, Floats], cut: Cut, mesh: Mesh) -> jax.Array:
    layout = VectorLayout.of(described, cut)

    def piece(rank: int) -> Floats:
        whole = np.zeros((1, layout.total), np.float32)
        for name, values in _rank_vectors(described, vectors, cut, rank):
            start, size = layout.places[name]
            whole[0, start : start + size] = values
        return whole

    return place_pieces(mesh, (cut.ranks, layout.total), BY_ROWS, piece)


def _vector(tensor: StoredTensor, weight: SlicedWeight) -> Floats:
    """All of a vector's or a filter's numbers in one row."""
    whole = weight.read(tuple(slice(0, size) for size in tensor.shape))
    values = whole.reshape(-1) + np.float32(tensor.offset)
    if tensor.order is not None:
        values = values[tensor.order.stored(len(values))]
    if not np.isfinite(values).all():
        raise not_finite(tensor.name)
    return values


def _check(given: str, weight: SlicedWeight, tensor: StoredTensor) -> None:
    if weight.shape != tensor.shape:
        raise misshapen(given, weight.shape, tensor.shape)
    if not weight.holds_numbers:
        raise not_floats(given, weight.format_name)


# Matrices


class _Place(NamedTuple):
    """Where a stored matrix goes: part of an array that may be fused from several."""

    array: str
    """The name of the array: that of its first part."""
    part: int
    num_parts: int
    spec: PartitionSpec
    rows: Callable[[int], Rows]
    """The matrix's rows that a rank holds, with a row per output."""
    columns: Callable[[int], Slices]
    height: int
    """Rows of a rank's piece. Zeros pad it if the rank holds fewer."""


def _places(described: Architecture, cut: Cut) -> Iterator[tuple[str, _Place]]:
    """The place of every matrix, by its tensor's name."""
    vocab, hidden = described.shape.vocab_size, described.shape.hidden_size
    tables = [described.embedding.name]
    if described.head is not None and described.head.name is not None:
        tables.append(described.head.name)
    for name in tables:
        own = partial(_vocabulary_rows, cut, vocab)
        yield f"{name}.weight", _Place(name, 0, 1, BY_ROWS, own, _all_columns(hidden), cut.vocab)
    if (positions := described.embedding.positions) is not None:
        every = np.arange(positions.rows)
        place = _Place(positions.name, 0, 1, COPIED, lambda rank: every, _all_columns(hidden), positions.rows)
        yield f"{positions.name}.weight", place
    for layer in described.layers:
        for number, projection in enumerate(layer.projections):
            shares = [layer_shares(described.shape, layer, cut, rank)[number] for rank in range(cut.ranks)]
            if shares[0].summed:
                yield _column_place(projection, shares)
            else:
                yield from _row_places(projection, shares)


def _row_places(projection: Projection, shares: Sequence[Share]) -> Iterator[tuple[str, _Place]]:
    """Column-parallel: the ranks' shares have rows of all parts, in order."""
    start, array = 0, projection.parts[0].name
    for number, part in enumerate(projection.parts):
        own = partial(_part_rows, shares, start, part.rows)
        columns = _all_columns(projection.columns)
        place = _Place(array, number, len(projection.parts), BY_ROWS, own, columns, len(own(0)))
        yield f"{part.name}.weight", place
        start += part.rows


def _part_rows(shares: Sequence[Share], start: int, count: int, rank: int) -> Rows:
    own = numbers_of(shares[rank].rows) - start
    return own[(own >= 0) & (own < count)]


def _column_place(projection: Projection, shares: Sequence[Share]) -> tuple[str, _Place]:
    """Row-parallel: a rank holds the columns of its own inputs."""
    [part] = projection.parts
    every = np.arange(part.rows)

    def columns(rank: int) -> Slices:
        return tuple(slice(own.start, own.stop) for own in shares[rank].columns)

    place = _Place(part.name, 0, 1, BY_COLUMNS, lambda rank: every, columns, part.rows)
    return f"{part.name}.weight", place


def _vocabulary_rows(cut: Cut, vocab: int, rank: int) -> Rows:
    return np.arange(rank * cut.vocab, min((rank + 1) * cut.vocab, vocab))


def _all_columns(count: int) -> Callable[[int], Slices]:
    return lambda rank: (slice(0, count),)


@dataclass(frozen=True, slots=True)
class _Placer:
    """Puts matrices on a mesh, converted to a dtype. Parts of a fused array wait on the devices for the others."""

    mesh: Mesh
    cut: Cut
    dtype: npt.DTypeLike
    places: Mapping[str, _Place]
    _arrays: dict[str, jax.Array] = field(default_factory=dict)
    _parts: dict[str, dict[int, jax.Array]] = field(default_factory=dict)

    def add(self, tensor: StoredTensor, weight: SlicedWeight) -> None:
        place = self.places[tensor.name]
        waiting = self._parts.setdefault(place.array, {})
        waiting[place.part] = self._placed(tensor, weight, place)
        if len(waiting) == place.num_parts:
            parts = tuple(waiting[number] for number in range(place.num_parts))
            fused = parts[0] if len(parts) == 1 else _fused(parts, mesh=self.mesh)
            # Waits, so that at most one array is on the devices both fused and in parts.
            self._arrays[place.array] = fused.block_until_ready()
            del self._parts[place.array]

    def weights(self, described: Architecture, vectors: jax.Array) -> Weights:
        """The model's weights, once all matrices have been added."""
        head, positions, arrays = described.head, described.embedding.positions, self._arrays
        return Weights(
            vectors=vectors,
            embedding=arrays[described.embedding.name],
            positions=None if positions is None else arrays[positions.name],
            head=None if head is None or head.name is None else arrays[head.name],
            layers=tuple(
                LayerWeights(**{name: arrays[own.parts[0].name] for name, own in _named_projections(layer).items()})
                for layer in described.layers
            ),
        )

    def _placed(self, tensor: StoredTensor, weight: SlicedWeight, place: _Place) -> jax.Array:
        height, width = place.height, _length(place.columns(0))
        divided = {BY_ROWS: (height * self.cut.ranks, width), BY_COLUMNS: (height, width * self.cut.ranks)}
        shape = divided.get(place.spec, (height, width))
        return place_pieces(self.mesh, shape, place.spec, partial(self._piece, tensor, weight, place))

    def _piece(self, tensor: StoredTensor, weight: SlicedWeight, place: _Place, rank: int) -> npt.NDArray[Any]:
        rows, columns = place.rows(rank), place.columns(rank)
        if tensor.order is not None:
            rows = np.array(tensor.order.stored(tensor.shape[0]))[rows]
        piece = np.zeros((place.height, _length(columns)), self.dtype)
        at = 0
        for run in _runs(rows):
            parts = [weight.read((own, run)).T if tensor.transposed else weight.read((run, own)) for own in columns]
            values = np.concatenate(parts, 1) if len(parts) > 1 else parts[0]
            piece[at : at + len(values)] = values
            at += len(values)
        return piece


def _length(parts: Slices) -> int:
    return sum(part.stop - part.start for part in parts)


def _runs(rows: Rows) -> Iterator[slice]:
    """Consecutive rows, as ranges."""
    if len(rows):
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            yield slice(int(run[0]), int(run[-1]) + 1)


@partial(jax.jit, static_argnames="mesh")
def _fused(parts: tuple[jax.Array, ...], *, mesh: Mesh) -> jax.Array:
    """Each rank's pieces as one, below each other."""
    return jax.shard_map(jnp.concatenate, mesh=mesh, in_specs=(BY_ROWS,), out_specs=BY_ROWS)(parts)


def place_pieces(
    mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, piece: Callable[[int], npt.NDArray[Any]]
) -> jax.Array:
    """An array made of one piece per rank of this process."""
    pieces: list[jax.Array] = []
    for rank, device in enumerate(mesh.devices.flat):
        if device.process_index != jax.process_index():
            continue
        made = piece(rank)
        if pieces:
            # At most one piece is on its way to a device while the next is read: host memory stays bounded.
            pieces[-1].block_until_ready()
        pieces.append(jax.device_put(made, device))
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), pieces)

"""A checkpoint's tensors as arrays on a mesh: each rank gets its own rows and columns. Knows no programs.

Matrices of one input are fused per rank ([q|k|v], [gate|up]), so that a rank's part is contiguous. All vectors (norms,
biases) are one array per rank, because each argument of a program makes launching it slower.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostro.models.architecture import Architecture, Layer, Part, Projection, StoredTensor
from ostro.models.tensor_errors import REDUNDANT, lacking, misshapen, no_place, not_finite, not_floats
from ostro.runner.cut import Cut
from ostro.runner.jax.layout import VectorLayout, bias_name, whole_norms, width_norms
from ostro.runner.jax.mesh import AXIS
from ostro.weights import Checkpoint
from ostro.weights.arrays import Floats, WeightArray

Rows = npt.NDArray[np.intp]

BY_ROWS = PartitionSpec(AXIS, None)
BY_COLUMNS = PartitionSpec(None, AXIS)
COPIED = PartitionSpec()


class LayerWeights(NamedTuple):
    """A layer's matrices, [out, in]; also their specs."""

    qkv: Any
    output: Any
    up: Any
    down: Any


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
    layer = LayerWeights(qkv=BY_ROWS, output=BY_COLUMNS, up=BY_ROWS, down=BY_COLUMNS)
    return Weights(
        vectors=BY_ROWS,
        embedding=BY_ROWS,
        positions=None if described.embedding.positions is None else COPIED,
        head=BY_ROWS if untied else None,
        layers=(layer,) * len(described.layers),
    )


def load_weights(
    described: Architecture, checkpoint: Checkpoint, cut: Cut, mesh: Mesh, dtype: npt.DTypeLike
) -> Weights:
    """Reads a model onto the mesh, one matrix at a time. Vectors are kept in float32, matrices in `dtype`.

    Raises BadCheckpoint if a tensor is missing, unknown or misshapen.
    """
    tensors = _Tensors(described, checkpoint)
    placed = _Placer(mesh, cut, dtype)
    own_heads = partial(qkv_rows, described, cut)
    head, positions = described.head, described.embedding.positions
    return Weights(
        vectors=_vectors(described, tensors, cut, mesh),
        embedding=placed.vocabulary(tensors.matrix(described.embedding.name)),
        positions=None if positions is None else placed.copied(tensors.matrix(positions.name)),
        head=None if head is None or head.name is None else placed.vocabulary(tensors.matrix(head.name)),
        layers=tuple(
            LayerWeights(
                qkv=placed.by_rows(tensors.projection(layer.attention.qkv), own_heads),
                output=placed.by_columns(tensors.projection(layer.attention.output)),
                up=placed.by_rows(tensors.projection(layer.mlp.up), _up_rows(layer, cut)),
                down=placed.by_columns(tensors.projection(layer.mlp.down)),
            )
            for layer in described.layers
        ),
    )


def qkv_rows(described: Architecture, cut: Cut, rank: int) -> Rows:
    """The rows of the whole [q|k|v] matrix that a rank holds."""
    shape = described.shape
    queries = _heads(rank * cut.heads, cut.heads, shape.head_dim)
    keys = _heads(shape.num_heads + cut.first_kv_head(rank), cut.kv_heads, shape.head_dim)
    return np.concatenate((queries, keys, keys + shape.num_kv_heads * shape.head_dim))


def _heads(first: int, count: int, width: int) -> Rows:
    return np.arange(first * width, (first + count) * width)


def _up_rows(layer: Layer, cut: Cut) -> Callable[[int], Rows]:
    inner = layer.mlp.down.columns
    each = inner // cut.ranks

    def rows(rank: int) -> Rows:
        up = np.arange(rank * each, (rank + 1) * each)
        return np.concatenate((up, up + inner)) if layer.mlp.gated else up

    return rows


def _rank_vectors(described: Architecture, tensors: "_Tensors", cut: Cut, rank: int) -> Iterator[tuple[str, Floats]]:
    """A rank's part of each vector, by name."""
    own, num_heads = qkv_rows(described, cut, rank), described.shape.num_heads * described.shape.head_dim
    for norm in whole_norms(described):
        yield from ((tensor.name, tensors.vector(tensor.name)) for tensor in norm.tensors())
    for attention in width_norms(described):
        assert attention.qk_norm is not None
        both = [tensors.vector(f"{norm.name}.weight") for norm in (attention.qk_norm.query, attention.qk_norm.key)]
        queries, keys = cut.heads * described.shape.head_dim, cut.kv_heads * described.shape.head_dim
        yield f"{attention.qk_norm.query.name}.weight", both[0][own[:queries]]
        yield f"{attention.qk_norm.key.name}.weight", both[1][own[queries : queries + keys] - num_heads]
    for layer in described.layers:
        attention, mlp = layer.attention, layer.mlp
        if attention.qkv.bias:
            yield bias_name(attention.qkv), tensors.bias(attention.qkv)[own]
        if mlp.up.bias:
            yield bias_name(mlp.up), tensors.bias(mlp.up)[_up_rows(layer, cut)(rank)]
        for projection in (attention.output, mlp.down):
            if projection.bias:
                yield bias_name(projection), tensors.bias(projection)


def _vectors(described: Architecture, tensors: "_Tensors", cut: Cut, mesh: Mesh) -> jax.Array:
    layout = VectorLayout.of(described, cut)

    def piece(rank: int) -> Floats:
        whole = np.zeros((1, layout.total), np.float32)
        for name, values in _rank_vectors(described, tensors, cut, rank):
            start, size = layout.places[name]
            whole[0, start : start + size] = values
        return whole

    return _placed(mesh, (cut.ranks, layout.total), BY_ROWS, piece)


class _Tensors:
    """A checkpoint's tensors by their names in the description; read and dequantized when asked for, with a row per
    output.
    """

    def __init__(self, described: Architecture, checkpoint: Checkpoint) -> None:
        self._wanted = {tensor.name: tensor for tensor in described.tensors()}
        self._found: dict[str, WeightArray] = {}
        for given, array in checkpoint.arrays():
            name = given if given in self._wanted else f"{described.backbone}.{given}"
            if name not in self._wanted or name in self._found:
                if REDUNDANT.fullmatch(given):
                    continue
                raise no_place(given)
            _check(given, array, self._wanted[name])
            self._found[name] = array
        if missing := self._wanted.keys() - self._found.keys():
            raise lacking(missing)

    def matrix(self, name: str) -> Floats:
        tensor = self._wanted[f"{name}.weight"]
        values = self._found[tensor.name].floats()
        return _by_part(values.T if tensor.transposed else values, tensor.by_head)

    def projection(self, described: Projection) -> Floats:
        return _joined(described.parts, self.matrix)

    def bias(self, described: Projection) -> Floats:
        return _joined(described.parts, lambda name: self.vector(f"{name}.bias"))

    def vector(self, name: str) -> Floats:
        tensor = self._wanted[name]
        values = _by_part(self._found[name].floats(), tensor.by_head) + np.float32(tensor.offset)
        if not np.isfinite(values).all():
            raise not_finite(name)
        return values


def _check(given: str, array: WeightArray, tensor: StoredTensor) -> None:
    if array.shape != tensor.shape:
        raise misshapen(given, array.shape, tensor.shape)
    if not (array.is_float or array.is_quantized):
        raise not_floats(given, array.format_name)


def _joined(parts: tuple[Part, ...], read: Callable[[str], Floats]) -> Floats:
    found = [read(part.name) for part in parts]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _by_part(values: Floats, heads: int) -> Floats:
    """Reorders rows that interleave q, k and v per head into all q, all k, all v; unchanged if `heads` is 0."""
    if not heads:
        return values
    return values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


class _Placer:
    """Puts whole matrices on a mesh, converted to a dtype."""

    def __init__(self, mesh: Mesh, cut: Cut, dtype: npt.DTypeLike) -> None:
        self._mesh, self._cut, self._dtype = mesh, cut, dtype

    def by_rows(self, whole: Floats, rows: Callable[[int], Rows]) -> jax.Array:
        """A rank gets the rows that `rows` lists for it, the same number for each."""
        shape = (self._cut.ranks * len(rows(0)), whole.shape[1])
        return _placed(self._mesh, shape, BY_ROWS, lambda rank: whole[rows(rank)].astype(self._dtype))

    def by_columns(self, whole: Floats) -> jax.Array:
        each = whole.shape[1] // self._cut.ranks

        def piece(rank: int) -> npt.NDArray[Any]:
            return whole[:, rank * each : (rank + 1) * each].astype(self._dtype)

        return _placed(self._mesh, whole.shape, BY_COLUMNS, piece)

    def vocabulary(self, whole: Floats) -> jax.Array:
        """Rows of zeros pad it to equal parts."""
        each = self._cut.vocab

        def piece(rank: int) -> npt.NDArray[Any]:
            own = whole[rank * each : (rank + 1) * each]
            padded = np.zeros((each, whole.shape[1]), self._dtype)
            padded[: len(own)] = own.astype(self._dtype)
            return padded

        return _placed(self._mesh, (self._cut.ranks * each, whole.shape[1]), BY_ROWS, piece)

    def copied(self, whole: Floats) -> jax.Array:
        return _placed(self._mesh, whole.shape, COPIED, lambda rank: whole.astype(self._dtype))


def _placed(
    mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, piece: Callable[[int], npt.NDArray[Any]]
) -> jax.Array:
    """An array made of one piece per rank, one piece at a time."""
    own = jax.process_index()
    pieces = [
        jax.device_put(piece(rank), device)
        for rank, device in enumerate(mesh.devices.flat)
        if device.process_index == own
    ]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), pieces)

"""The torch modules of a decoder, each built from its part of an `Architecture`. Knows no family.

Each module with weights states their names and layout in checkpoints, so that loading is a lookup.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.kernels.linear import linear, pack
from ostro.models import architecture as arch
from ostro.models.cut import Share, input_share, part_rows, qkv_share, up_share, vocabulary_share
from ostro.torch_models.base import AttentionContext, Module
from ostro.torch_models.loading import Picked, Place, Taken, Weighted
from ostro.torch_models.rope import Rotation
from ostro.torch_models.shard import Shard


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: Mapping[arch.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu2,
}


def clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=arch.CLAMP), up.clamp(-arch.CLAMP, arch.CLAMP)
    return torch.sigmoid(gate * arch.SLOPE).mul_(gate).mul_(up.add_(1.0))


def gating(activation: arch.Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """Turns gates and ups into inner states."""
    if activation == "clamped_silu":
        return clamped_silu
    act = ACTIVATIONS[activation]
    return lambda gate, up: act(gate).mul_(up)


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Matrix(Weighted):
    """A weight matrix, [out, in]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.packed: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, however the numbers are stored."""
        out_features, in_features = self.weight.shape
        return out_features, in_features

    def pack(self) -> None:
        """Makes a second copy in the layout for many rows. The weight must not change afterwards."""
        self.packed = pack(self.weight.data)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, bias, self.packed)


class OwnPart(NamedTuple):
    """A rank's part of a described projection: all of it, if there is one rank."""

    described: arch.Projection
    share: Share

    def rows(self) -> list[tuple[range, ...]]:
        """The rank's rows of each part of the projection, numbered within the part."""
        return part_rows(self.described, self.share)


class Linear(Matrix):
    """y = x Wᵀ + b, with W stored [out, in], plus the adapters' terms."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.bias = parameter(out_features) if bias else None
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds the adapters' terms for the rows of x to y; see `torch_models.lora`."""
        self.reduce: Callable[[Tensor], Tensor] | None = None
        """Sums the ranks' results, if each has only a part of the inputs."""
        self.own: OwnPart | None = None
        """The rank's part of a described projection, if it is one."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x, self.bias)
        if self.adapt is not None:
            self.adapt(x, y)
        return y if self.reduce is None else self.reduce(y)


class Projection(Linear):
    """A described projection, which checkpoints may store in several parts; with several ranks, one rank's share."""

    def __init__(self, described: arch.Projection, share: Share | None = None, shard: Shard | None = None) -> None:
        own = share or Share((range(described.rows),), (range(described.columns),))
        super().__init__(own.num_columns, sum(map(len, own.rows)) + own.padding, bias=described.bias)
        self.described, self.share, self.is_whole = described, own, share is None
        self.own = OwnPart(described, own)
        # Zeroed, because no checkpoint fills it and it is multiplied like the rest.
        self.weight.data[len(self.weight) - own.padding :].zero_()
        self.adds_bias = not own.summed or shard is None or shard.rank == 0
        """Whether this rank adds the bias: only one of the ranks whose results are summed does."""
        if own.summed and shard is not None:
            self.reduce = shard.group.sum

    def places(self, path: str) -> dict[str, Place]:
        own = part_rows(self.described, self.share)
        sizes = [sum(map(len, ranges)) for ranges in own]
        places: dict[str, Place] = {}
        for name, local in self.named_parameters(recurse=False):
            held = local.data[: sum(sizes)].split(sizes)
            for part, ranges, rows in zip(self.described.parts, own, held, strict=True):
                places[f"{part.name}.{name}"] = self._place(rows, part, ranges)
        return places

    def _place(self, memory: Tensor, part: arch.Part, ranges: tuple[range, ...]) -> Place:
        """The place of a part's matrix or bias, of which this rank holds these rows."""
        described, is_matrix = self.described, memory.dim() == 2
        transposed = described.transposed and is_matrix
        scales = described.matrix_scales(part) if is_matrix else part.scales
        assert not scales or not transposed, "scaled parts are not transposed"
        if not self.share.summed:
            scales = _scales_of(scales, ranges)
        place = Place(memory.T if transposed else memory, scales=scales)
        if self.is_whole and part.order is None:
            return place
        shape: tuple[int, ...] = (part.rows, described.columns) if is_matrix else (part.rows,)
        if transposed:
            shape = shape[::-1]
        if self.share.summed:
            if not is_matrix:
                return replace(place, left_out=not self.adds_bias)
            return replace(place, taken=Taken(shape, 0 if transposed else 1, self.share.columns))
        if part.order is not None:
            stored = part.order.stored(part.rows)
            return replace(place, taken=Picked(shape, tuple(stored[row] for own in ranges for row in own)))
        return replace(place, taken=Taken(shape, 1 if transposed else 0, ranges))


def _scales_of(scales: Sequence[arch.RowScale], ranges: Sequence[range]) -> tuple[arch.RowScale, ...]:
    """Those of some of the rows."""
    found = []
    for own in ranges:
        start = 0
        for rows, factor in scales:
            count = min(own.stop, start + rows) - max(own.start, start)
            if count > 0:
                found.append(arch.RowScale(count, factor))
            start += rows
    return tuple(found)


class ExactProjection(Projection):
    """One that is never quantized; see `Architecture.exact_names`."""


class RMSNorm(Weighted):
    """Scales to unit root mean square, then by `weight`.

    An offset is added to the stored weight once, on loading. Near one, bfloat16 would round most of the stored
    difference away, so a norm with an offset keeps its weights and arithmetic in float32.
    """

    def __init__(self, described: arch.Norm) -> None:
        super().__init__()
        self.weight = parameter(described.size, dtype=torch.float32 if described.offset else None)
        self.eps = described.eps
        self.described = described

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype:
            return self.forward(x.to(weight.dtype)).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def places(self, path: str) -> dict[str, Place]:
        return {f"{self.described.name}.weight": Place(self.weight.data, offset=self.described.offset)}


class LayerNorm(Weighted):
    def __init__(self, described: arch.Norm) -> None:
        super().__init__()
        self.weight = parameter(described.size)
        self.bias: Tensor
        if described.biased:
            self.bias = parameter(described.size)
        else:
            self.register_buffer("bias", torch.zeros_like(self.weight), persistent=False)
        self.eps = described.eps
        self.described = described

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def places(self, path: str) -> dict[str, Place]:
        return super().places(self.described.name)


class HeadNorm(Weighted):
    """RMSNorm of each query and key head, in one pass: heads differ only in the final scale."""

    def __init__(self, described: arch.QKNorm, shape: arch.ModelShape) -> None:
        super().__init__()
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.eps = described.query.eps
        self.described = described
        dtype = torch.float32 if described.query.offset else None
        self.weight = parameter(shape.num_heads + shape.num_kv_heads, shape.head_dim, dtype=dtype)

    def forward(self, qk: Tensor) -> Tensor:
        weight = self.weight
        if qk.dtype != weight.dtype:
            return self.forward(qk.to(weight.dtype)).to(qk.dtype)
        return F.rms_norm(qk, (self.head_dim,), None, self.eps) * weight

    def places(self, path: str) -> dict[str, Place]:
        halves = self.weight.data[: self.num_heads], self.weight.data[self.num_heads :]
        norms = self.described.query, self.described.key
        return {
            f"{norm.name}.weight": Place(rows, offset=norm.offset, repeated=True)
            for norm, rows in zip(norms, halves, strict=True)
        }


class UnweightedNorm(Module):
    """Scales each head to unit root mean square."""

    def __init__(self, described: arch.Norm) -> None:
        super().__init__()
        self.size, self.eps = described.size, described.eps

    def forward(self, heads: Tensor) -> Tensor:
        return F.rms_norm(heads, (self.size,), None, self.eps)


class WidthNorm(Weighted):
    """RMSNorm over all query heads as one vector, and over all key heads as another."""

    def __init__(self, described: arch.QKNorm, widths: tuple[int, int] | None = None) -> None:
        """`widths` are those of queries and keys; None is for all heads of the model."""
        super().__init__()
        self.eps = described.query.eps
        self.widths = widths or (described.query.size, described.key.size)
        self.q_weight, self.k_weight = (parameter(width) for width in self.widths)
        self.described = described

    def forward(self, qk: Tensor) -> Tensor:
        q, k = qk.flatten(1).split(self.widths, 1)
        q = F.rms_norm(q, self.q_weight.shape, self.q_weight, self.eps)
        k = F.rms_norm(k, self.k_weight.shape, self.k_weight, self.eps)
        return torch.cat((q, k), 1).view(qk.shape)

    def places(self, path: str) -> dict[str, Place]:
        return {
            f"{self.described.query.name}.weight": Place(self.q_weight.data),
            f"{self.described.key.name}.weight": Place(self.k_weight.data),
        }


class CutWidthNorm(WidthNorm):
    """The same where each rank has some of the heads: the ranks add up their sums of squares."""

    def __init__(self, described: arch.QKNorm, shape: arch.ModelShape, shard: Shard) -> None:
        """`shape` is that of the rank's part."""
        super().__init__(described, (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim))
        self._head_dim, self._shard = shape.head_dim, shard

    def forward(self, qk: Tensor) -> Tensor:
        halves = qk.flatten(1).float().split(self.widths, 1)
        squares = self._shard.group.sum(torch.stack([half.square().sum(1) for half in halves], 1))
        norms = self.described.query, self.described.key
        # A KV head that several ranks hold was counted once for each.
        sizes = norms[0].size, norms[1].size * self._shard.cut.kv_copies
        scaled = [
            half * torch.rsqrt(squares[:, index : index + 1] / size + self.eps)
            for index, (half, size) in enumerate(zip(halves, sizes, strict=True))
        ]
        weight = torch.cat((self.q_weight, self.k_weight))
        return (torch.cat(scaled, 1) * weight).to(qk.dtype).view(qk.shape)

    def places(self, path: str) -> dict[str, Place]:
        cut, rank, width = self._shard.cut, self._shard.rank, self._head_dim
        firsts = rank * cut.heads * width, cut.first_kv_head(rank) * width
        norms = self.described.query, self.described.key
        return {
            name: replace(place, taken=Taken((norm.size,), 0, (range(first, first + len(place.memory)),)))
            for (name, place), norm, first in zip(super().places(path).items(), norms, firsts, strict=True)
        }


class Embedding(Matrix):
    """A row per token or position; as a tied head, the matmul with all rows.

    The scale is rounded to the weights' dtype as in training: 55.5 and not 55.4256 in bfloat16.
    """

    def __init__(self, name: str, rows: int, size: int, *, scale: float = 1.0) -> None:
        super().__init__(size, rows)
        self.name = name
        self.scale = torch.tensor(scale, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def places(self, path: str) -> dict[str, Place]:
        return super().places(self.name)


class CutEmbedding(Embedding):
    """One rank's rows: those of other tokens are zeros, until the ranks add up what they found."""

    def __init__(self, name: str, shape: arch.ModelShape, shard: Shard, *, scale: float = 1.0) -> None:
        super().__init__(name, shard.cut.vocab, shape.hidden_size, scale=scale)
        [self._own] = vocabulary_share(shape, shard.cut, shard.rank).rows
        self._shape, self._shard = shape, shard
        # Padding, as in a head.
        self.weight.data[len(self._own) :].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._own.start
        elsewhere = (local < 0) | (local >= len(self._own))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = self._shard.group.sum(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def places(self, path: str) -> dict[str, Place]:
        taken = Taken((self._shape.vocab_size, self._shape.hidden_size), 0, (self._own,))
        return {f"{self.name}.weight": Place(self.weight.data[: len(self._own)], taken=taken)}


class Sinks(Weighted):
    """A score per head that takes part in each softmax, without a value."""

    def __init__(self, described: arch.Sinks) -> None:
        super().__init__()
        self.weight = parameter(described.heads)
        self.described = described

    def places(self, path: str) -> dict[str, Place]:
        return {self.described.name: Place(self.weight.data)}


class Vector(Weighted):
    """A vector of numbers that is not a matrix's bias."""

    def __init__(self, name: str, size: int, *, dtype: torch.dtype | None = None, taken: Taken | None = None) -> None:
        """`taken` is a rank's part, of this size; None for all of it."""
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.name, self.taken = name, taken

    def places(self, path: str) -> dict[str, Place]:
        return {self.name: Place(self.weight.data, taken=self.taken)}


class Attention(Module):
    """Grouped-query attention. Norms and rotation process queries and keys together."""

    def __init__(
        self, described: arch.Attention, layer: int, shape: arch.ModelShape, shard: Shard | None = None
    ) -> None:
        """`shape` is that of the whole model."""
        super().__init__()
        shape = shape.of_layer(layer)
        qkv: Share | None = None
        output: Share | None = None
        if shard is not None:
            assert described.sinks is None, "sinks are not divided over ranks"
            qkv = qkv_share(shape, described, shard.cut, shard.rank)
            shape = shard.cut.shape(shape)
            output = input_share(described.output, shard.cut, shard.rank)
        self.layer, self.spec, self.head_dim = layer, described.spec, shape.head_dim
        self.q_and_k = (shape.num_heads, shape.num_kv_heads)
        self.qk_and_v = (shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        self.values_are_keys, self.gated = described.values_are_keys, described.gated
        self.qkv_proj = Projection(described.qkv, qkv)
        self.qk_norm = _qk_norm(described.qk_norm, shape, shard)
        self.value_norm = None if described.value_norm is None else UnweightedNorm(described.value_norm)
        self.sinks = None if described.sinks is None else Sinks(described.sinks)
        self.o_proj = Projection(described.output, output, shard)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: AttentionContext, query_scales: Tensor | None = None
    ) -> Tensor:
        """`query_scales` has a factor per token, [tokens, 1, 1]."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        gates, heads = heads.tensor_split((self.q_and_k[0],), 1) if self.gated else (None, heads)
        if self.values_are_keys:
            qk, v = heads, heads[:, self.q_and_k[0] :]
        else:
            qk, v = heads.split_with_sizes(self.qk_and_v, 1)
        if self.value_norm is not None:
            v = self.value_norm(v)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if rotation is not None:
            qk = rotation(qk)
        q, k = qk.split_with_sizes(self.q_and_k, 1)
        if query_scales is not None:
            q = q * query_scales
        sinks = None if self.sinks is None else self.sinks.weight
        seen = ctx.attend(self.layer, q, k, v, self.spec, sinks)
        return self.o_proj(seen if gates is None else gates.flatten(1).sigmoid().mul_(seen))


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, described: arch.MLP, shard: Shard | None = None) -> None:
        super().__init__()
        up, down = _mlp_projections(described, shard)
        self.gate_up_proj: Projection = up
        self.down_proj: Linear = down
        self.act = ACTIVATIONS[described.activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act(gate).mul_(up))


class PlainMLP(Module):
    """down(act(up(x)))."""

    def __init__(self, described: arch.MLP, shard: Shard | None = None) -> None:
        super().__init__()
        self.up_proj, self.down_proj = _mlp_projections(described, shard)
        self.act = ACTIVATIONS[described.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


def mlp_module(described: arch.MLP, shard: Shard | None = None) -> GatedMLP | PlainMLP:
    return GatedMLP(described, shard) if described.gated else PlainMLP(described, shard)


def _mlp_projections(described: arch.MLP, shard: Shard | None) -> tuple[Projection, Projection]:
    if shard is None:
        return Projection(described.up), Projection(described.down)
    cut, rank = shard.cut, shard.rank
    return (
        Projection(described.up, up_share(described, cut, rank)),
        Projection(described.down, input_share(described.down, cut, rank), shard),
    )


def norm_module(described: arch.Norm) -> RMSNorm | LayerNorm:
    return RMSNorm(described) if described.kind == "rms" else LayerNorm(described)


def _qk_norm(
    described: arch.QKNorm | None, shape: arch.ModelShape, shard: Shard | None
) -> HeadNorm | UnweightedNorm | WidthNorm | None:
    if described is None:
        return None
    if described.over == "head":
        return HeadNorm(described, shape) if described.query.weighted else UnweightedNorm(described.query)
    return WidthNorm(described) if shard is None else CutWidthNorm(described, shape, shard)

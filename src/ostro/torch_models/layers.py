"""The torch modules of a decoder, each built from its part of an `Architecture`. Knows no family.

Each module with weights states their names and layout in checkpoints, so that loading is a lookup.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.kernels.linear import linear, pack
from ostro.models import architecture as arch
from ostro.torch_models.base import AttentionContext, Module
from ostro.torch_models.loading import Place, Weighted
from ostro.torch_models.rope import Rotation


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[arch.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
}


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Matrix(Weighted):
    """A weight matrix, [out, in]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Makes a second copy in the layout for many rows. The weight must not change afterwards."""
        self.packed = pack(self.weight.data)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, bias, self.packed)


class Linear(Matrix):
    """y = x Wᵀ + b, with W stored [out, in], plus the adapters' terms."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.bias = parameter(out_features) if bias else None
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds the adapters' terms for the rows of x to y; see `torch_models.lora`."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.bias)
        if self.adapt is not None:
            self.adapt(x, y)
        return y


class Projection(Linear):
    """A described projection, which checkpoints may store in several parts."""

    def __init__(self, described: arch.Projection) -> None:
        super().__init__(described.columns, described.rows, bias=described.bias)
        self.described = described

    def places(self, path: str) -> dict[str, Place]:
        sizes = [part.rows for part in self.described.parts]
        places: dict[str, Place] = {}
        for name, whole in self.named_parameters(recurse=False):
            for part, rows in zip(self.described.parts, whole.data.split(sizes), strict=True):
                places[f"{part.name}.{name}"] = self._place(rows)
        return places

    def _place(self, rows: Tensor) -> Place:
        if self.described.by_head:
            return Place(rows.unflatten(0, (3, self.described.by_head, -1)).transpose(0, 1), merged=3)
        return Place(rows.T if self.described.transposed and rows.dim() == 2 else rows)


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
        self.weight, self.bias = parameter(described.size), parameter(described.size)
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


class WidthNorm(Weighted):
    """RMSNorm over all query heads as one vector, and over all key heads as another."""

    def __init__(self, described: arch.QKNorm) -> None:
        super().__init__()
        self.eps = described.query.eps
        self.widths = (described.query.size, described.key.size)
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


class Attention(Module):
    """Grouped-query attention. Norms and rotation process queries and keys together."""

    def __init__(self, described: arch.Attention, layer: int, shape: arch.ModelShape) -> None:
        super().__init__()
        self.layer, self.spec, self.head_dim = layer, described.spec, shape.head_dim
        self.q_and_k = (shape.num_heads, shape.num_kv_heads)
        self.qk_and_v = (shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        self.qkv_proj = Projection(described.qkv)
        self.qk_norm = _qk_norm(described.qk_norm, shape)
        self.o_proj = Projection(described.output)

    def forward(self, x: Tensor, rotation: Rotation | None, ctx: AttentionContext) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk, v = heads.split_with_sizes(self.qk_and_v, 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if rotation is not None:
            qk = rotation(qk)
        q, k = qk.split_with_sizes(self.q_and_k, 1)
        return self.o_proj(ctx.attend(self.layer, q, k, v, self.spec))


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, described: arch.MLP) -> None:
        super().__init__()
        self.gate_up_proj: Projection = Projection(described.up)
        self.down_proj: Linear = Projection(described.down)
        self.act = ACTIVATIONS[described.activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act(gate).mul_(up))


class PlainMLP(Module):
    """down(act(up(x)))."""

    def __init__(self, described: arch.MLP) -> None:
        super().__init__()
        self.up_proj = Projection(described.up)
        self.down_proj = Projection(described.down)
        self.act = ACTIVATIONS[described.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


def norm_module(described: arch.Norm) -> RMSNorm | LayerNorm:
    return RMSNorm(described) if described.kind == "rms" else LayerNorm(described)


def _qk_norm(described: arch.QKNorm | None, shape: arch.ModelShape) -> HeadNorm | WidthNorm | None:
    if described is None:
        return None
    return HeadNorm(described, shape) if described.over == "head" else WidthNorm(described)

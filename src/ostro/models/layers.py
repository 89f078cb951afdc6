"""The parts that decoder families share: projections, norms, attention, gated MLP. Knows no family by name.

Projections that read the same input are fused into one matrix. Each part that holds weights says under which names and
in which form checkpoints keep them, so that loading is a look-up.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.errors import UnsupportedModel
from ostro.kernels.linear import linear, pack
from ostro.models.base import AttentionContext, AttentionSpec, ModelShape, Module
from ostro.models.loading import Place, Weighted
from ostro.models.rope import Rotation


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"Activation {name!r} is not known; known are {', '.join(sorted(ACTIVATIONS))}.")
    return ACTIVATIONS[name]


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Matrix(Weighted):
    """A weight, [out, in], that rows are multiplied by."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Lays out a second copy for the products of many rows. The weight must not change any more."""
        self.packed = pack(self.weight.data)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, bias, self.packed)


class Linear(Matrix):
    """y = x Wᵀ + b, with W stored [out, in], and what adapters add to it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.bias = parameter(out_features) if bias else None
        self.adapt: Callable[[Tensor, Tensor], None] | None = None
        """Adds to y what adapters give for the rows of x; see `models.lora`."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.bias)
        if self.adapt is not None:
            self.adapt(x, y)
        return y


class FusedLinear(Linear):
    """Several projections of one input as one matrix, rows in the order of `parts`.

    Checkpoints hold the parts by name beside this module's own, or already fused where `stored_fused`.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool = False, stored_fused: bool = False
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)
        self.stored_fused = stored_fused

    def places(self, path: str) -> dict[str, Place]:
        if self.stored_fused:
            return super().places(path)
        parent = path.rpartition(".")[0]
        return {
            f"{parent}.{part}.{name}": Place(rows)
            for name, whole in self.named_parameters(recurse=False)
            for part, rows in zip(self.parts, whole.data.split(list(self.parts.values())), strict=True)
        }


class RMSNorm(Weighted):
    """Scales to unit root mean square, then by `weight`.

    Some families store weights as their difference from one: the `offset` is added once, at loading. Near one bfloat16
    would round most of the difference away, so such a norm keeps its weights and its arithmetic in float32.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32 if offset else None)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype:
            return self.forward(x.to(weight.dtype)).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def places(self, path: str) -> dict[str, Place]:
        return {f"{path}.weight": Place(self.weight.data, offset=self.offset)}


class HeadNorm(Weighted):
    """RMSNorm of each query and key head over its own width, in one pass: heads differ only in the final scale."""

    def __init__(self, shape: ModelShape, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.eps, self.offset = eps, offset
        dtype = torch.float32 if offset else None
        self.weight = parameter(shape.num_heads + shape.num_kv_heads, shape.head_dim, dtype=dtype)

    def forward(self, qk: Tensor) -> Tensor:
        weight = self.weight
        if qk.dtype != weight.dtype:
            return self.forward(qk.to(weight.dtype)).to(qk.dtype)
        return F.rms_norm(qk, (self.head_dim,), None, self.eps) * weight

    def places(self, path: str) -> dict[str, Place]:
        parent = path.rpartition(".")[0]
        queries, keys = self.weight.data[: self.num_heads], self.weight.data[self.num_heads :]
        return {
            f"{parent}.q_norm.weight": Place(queries, offset=self.offset, repeated=True),
            f"{parent}.k_norm.weight": Place(keys, offset=self.offset, repeated=True),
        }


class Embedding(Matrix):
    """A row for each token; as a tied head, the product with all of them."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__(size, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Attention(Module):
    """Grouped-query attention with rotary positions.

    `qk_norm` maps queries and keys together, [tokens, heads + kv_heads, head_dim], before they rotate.
    """

    def __init__(
        self,
        layer: int,
        shape: ModelShape,
        spec: AttentionSpec,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: nn.Module | None = None,
        stored_fused: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.spec, self.head_dim = layer, spec, shape.head_dim
        self.q_and_k = (shape.num_heads, shape.num_kv_heads)
        self.qk_and_v = (shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = FusedLinear(shape.hidden_size, parts, bias=qkv_bias, stored_fused=stored_fused)
        self.qk_norm = qk_norm
        self.o_proj = Linear(queries, shape.hidden_size, bias=o_bias)

    def forward(self, x: Tensor, rotation: Rotation, ctx: AttentionContext) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk, v = heads.split_with_sizes(self.qk_and_v, 1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotation(qk).split_with_sizes(self.q_and_k, 1)
        return self.o_proj(ctx.attend(self.layer, q, k, v, self.spec))


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, act: str, bias: bool = False, stored_fused: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias=bias, stored_fused=stored_fused)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act(gate).mul_(up))

"""Blocks of a Hierarchical Reasoning Model: attention and MLP, dense or mixture of experts, each followed by a norm.

Every part maps [rows, hidden] such that no sequence's result depends on another's; see `torch_models.hrm`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostro.models.hrm_config import HrmConfig
from ostro.torch_models.base import Module
from ostro.torch_models.layers import Linear, parameter
from ostro.torch_models.loading import Weighted
from ostro.torch_models.ragged import Ragged, SequenceRun
from ostro.torch_models.rope import Rotation


def silu(x: Tensor) -> Tensor:
    """Gives an element the same bits wherever it is in a tensor, unlike `F.silu`.

    torch splits elementwise work into one piece per thread. The remainder of a piece after whole SIMD vectors goes
    through scalar code, which in `F.silu` and `F.gelu` rounds differently. `exp` and `erf` have no second path.
    """
    return x / x.neg().exp_().add_(1)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU, stable in the same way as `silu`."""
    return x.mul(math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)


class StableLinear(Linear):
    """A matmul that, once packed, gives a row the same result for any number of rows."""

    def try_pack(self) -> bool:
        """Replaces the plain layout by the packed one; leaves it unchanged if packing is not available."""
        self.pack()
        if self.packed is None:
            return False
        self.weight.data = self.weight.data.new_empty(0)
        return True

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        # Also for a single row: the plain matmul would be faster but sums in a different order.
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, "none", [], "")


class Table(Weighted):
    """A row per token or position."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.embedding_weight = parameter(rows, size)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_weight)


class Level(Module):
    """A stack of blocks whose input is its state plus an injected term."""

    def __init__(self, config: HrmConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(config) for _ in range(num_layers))

    def forward(self, state: Tensor, injection: Tensor, rotation: Rotation | None, layout: Ragged) -> Tensor:
        x = state + injection
        for layer in self.layers:
            x = layer(x, rotation, layout)
        return x


class _Block(Module):
    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Experts(config) if config.num_experts else _GatedMLP(config.hidden_size, config.inner_size)
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor, rotation: Rotation | None, layout: Ragged) -> Tensor:
        x = self._norm(self.self_attn(x, rotation, layout).add_(x))
        return self._norm(self.mlp(x).add_(x))

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)


class _Attention(Module):
    """Bidirectional attention within each sequence. Neighbouring sequences of equal length are batched."""

    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.qkv_proj = StableLinear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = StableLinear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation | None, layout: Ragged) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        qk, v = heads.split_with_sizes((2 * self.num_heads, self.num_heads), 1)
        if rotation is not None:
            qk = rotation(qk)
        q, k = qk.split_with_sizes((self.num_heads, self.num_heads), 1)
        mixed = [self._attend(q, k, v, run) for run in layout.runs]
        return self.o_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, run: SequenceRun) -> Tensor:
        parts = (part[run.start : run.end].unflatten(0, (run.count, run.length)).transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(run.end - run.start, -1)


class _GatedMLP(Module):
    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_up_proj = StableLinear(hidden_size, 2 * inner_size)
        self.down_proj = StableLinear(inner_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(silu(gate).mul_(up))


class _Expert(Module):
    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.w1, self.w2 = StableLinear(hidden_size, inner_size), StableLinear(inner_size, hidden_size)


class _Router(Module):
    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate = StableLinear(hidden_size, num_experts)


class _Mixture(Module):
    """The module path of router and experts in checkpoints."""

    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        self.router = _Router(config.hidden_size, config.num_experts)
        self.each = tuple(_Expert(config.hidden_size, config.inner_size) for _ in range(config.num_experts))
        self.experts = nn.ModuleList(self.each)


class _Experts(Module):
    """Routes each token to its highest-scoring experts, weighted by a softmax over those scores alone."""

    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        self.moe = _Mixture(config)
        self.per_token = config.experts_per_token

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.moe.router.gate(x).topk(self.per_token)
        shares = scores.float().softmax(-1).to(x.dtype)
        visits = chosen.flatten()
        order = visits.argsort(stable=True)
        counts = visits.bincount(minlength=len(self.moe.each)).tolist()
        results = torch.empty(len(visits), x.shape[-1], dtype=x.dtype, device=x.device)
        results[order] = self._visit(x[order // self.per_token], counts)
        # Added one by one rather than with sum(): the order must not depend on the shape.
        parts = (results.view(*shares.shape, -1) * shares[..., None]).unbind(1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _visit(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Applies experts to rows sorted by expert; `counts` has the number of rows for each."""
        pairs = [(expert, part) for expert, part in zip(self.moe.each, rows.split(counts), strict=True) if len(part)]
        inner = gelu(torch.cat([expert.w1(part) for expert, part in pairs]))
        parts = inner.split([count for count in counts if count])
        return torch.cat([expert.w2(part) for (expert, _), part in zip(pairs, parts, strict=True)])

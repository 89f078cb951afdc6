"""Mixers with a recurrent state, as torch modules. Each one's formulas are those of its description. Knows no family.

States are kept and advanced in float32, whatever the model's number format. What lies between a mixer's projections is
the business of the step's states: they call the mixer's own `plain`, or a kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.models import architecture as arch
from ostro.torch_models.base import Module, PlainStates, StatefulContext
from ostro.torch_models.layers import ExactProjection, Projection, Vector, parameter
from ostro.torch_models.loading import Place, Weighted
from ostro.torch_models.rope import Rotation


class Convolution(Weighted):
    """A causal filter per channel, [taps, channels], in float32."""

    def __init__(self, described: arch.Convolution, layer: int) -> None:
        super().__init__()
        self.weight = parameter(described.taps, described.channels, dtype=torch.float32)
        self.bias = parameter(described.channels, dtype=torch.float32) if described.bias else None
        self.described, self.layer = described, layer

    def forward(self, x: Tensor, states: PlainStates) -> Tensor:
        """The result is in float32."""
        return states.convolve(self.layer, x, self.weight, self.bias)

    def places(self, path: str) -> dict[str, Place]:
        name = self.described.name
        places = {f"{name}.weight": Place(self.weight.data.T.unsqueeze(1))}
        return places if self.bias is None else places | {f"{name}.bias": Place(self.bias.data)}


class ShortConvolution(Module):
    def __init__(self, described: arch.ShortConvolution, layer: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = Projection(described.inputs), Projection(described.output)
        self.conv = Convolution(described.conv, layer)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: StatefulContext, query_scales: Tensor | None = None
    ) -> Tensor:
        return self.out_proj(ctx.states.mix(self, self.in_proj(x)))

    def plain(self, states: PlainStates, rows: Tensor) -> Tensor:
        b, c, u = rows.chunk(3, -1)
        return c * self.conv(b * u, states).to(c.dtype)


class GatedDelta(Module):
    def __init__(self, described: arch.GatedDelta, layer: int) -> None:
        super().__init__()
        heads = described.value_heads
        self.in_proj, self.out_proj = Projection(described.inputs), Projection(described.output)
        self.gates = ExactProjection(described.gates)
        self.conv = Convolution(described.conv, layer)
        self.decay, self.decay_bias = (
            Vector(name, heads, dtype=torch.float32) for name in (described.decay, described.decay_bias)
        )
        self.norm = Vector(f"{described.norm.name}.weight", described.norm.size, dtype=torch.float32)
        self.described, self.layer = described, layer
        self.size = (heads, described.key_dim, described.value_dim)
        keys, values = described.key_heads * described.key_dim, heads * described.value_dim
        self.mixed_and_gates, self.qk_and_v = (2 * keys + values, values), (2 * keys, values)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: StatefulContext, query_scales: Tensor | None = None
    ) -> Tensor:
        return self.out_proj(ctx.states.mix(self, self.in_proj(x), self.gates(x)))

    def plain(self, states: PlainStates, rows: Tensor, gates: Tensor) -> Tensor:
        own = self.described
        mixed, z = rows.split_with_sizes(self.mixed_and_gates, 1)
        qk, v = F.silu(self.conv(mixed, states)).split_with_sizes(self.qk_and_v, 1)
        q, k = self._of_value_heads(_unit(qk.unflatten(1, (2, -1, own.key_dim)))).unbind(1)
        v, z = v.unflatten(1, (-1, own.value_dim)), z.unflatten(1, (-1, own.value_dim))
        b, a = gates.float().chunk(2, -1)
        kept = torch.exp(-self.decay.weight.exp() * F.softplus(a + self.decay_bias.weight))
        seen = states.recur(self.layer, self.size, delta_step, q * own.key_dim**-0.5, k, v, kept, b.sigmoid())
        seen = F.rms_norm(seen, (own.value_dim,), self.norm.weight, own.norm.eps) * F.silu(z.float())
        return seen.flatten(1).to(rows.dtype)

    def _of_value_heads(self, heads: Tensor) -> Tensor:
        """[rows, 2, key heads, …] -> [rows, 2, value heads, …]"""
        times = self.described.value_heads // self.described.key_heads
        if self.described.head_map == "tiled":
            return heads.repeat(1, 1, times, 1)
        return heads.repeat_interleave(times, 2)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + arch.GatedDelta.QK_EPS)


def delta_step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, strength: Tensor) -> Tensor:
    """One token of each sequence: s [n, heads, key_dim, value_dim], which it changes; q, k [n, heads, key_dim]; v
    [n, heads, value_dim]; the share of s that is kept, and the strength of what is written, [n, heads].
    """
    s.mul_(kept[..., None, None])
    predicted = torch.matmul(k.unsqueeze(-2), s).squeeze(-2)
    written = (v - predicted) * strength.unsqueeze(-1)
    s.addcmul_(k.unsqueeze(-1), written.unsqueeze(-2))
    return torch.matmul(q.unsqueeze(-2), s).squeeze(-2)


class Mamba2(Module):
    def __init__(self, described: arch.Mamba2, layer: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = Projection(described.inputs), Projection(described.output)
        self.conv = Convolution(described.conv, layer)
        self.decay, self.step_bias, self.skip = (
            Vector(name, described.heads, dtype=torch.float32)
            for name in (described.decay, described.step_bias, described.skip)
        )
        norm = described.norm
        self.norm = None if norm is None else Vector(f"{norm.name}.weight", norm.size, dtype=torch.float32)
        self.described, self.layer = described, layer
        self.size = (described.heads, described.head_dim, described.state_size)
        groups = described.groups * described.state_size
        self.z_mixed_t = (described.width, described.width + 2 * groups, described.heads)
        self.u_b_c = (described.width, groups, groups)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: StatefulContext, query_scales: Tensor | None = None
    ) -> Tensor:
        return self.out_proj(ctx.states.mix(self, self.in_proj(x)))

    def plain(self, states: PlainStates, rows: Tensor) -> Tensor:
        own = self.described
        z, mixed, t = rows.split_with_sizes(self.z_mixed_t, 1)
        u, b, c = F.silu(self.conv(mixed, states)).split_with_sizes(self.u_b_c, 1)
        u = u.unflatten(1, (own.heads, own.head_dim))
        b, c = (self._of_heads(each.unflatten(1, (own.groups, own.state_size))) for each in (b, c))
        t = F.softplus(t.float() + self.step_bias.weight)
        kept = torch.exp(-self.decay.weight.exp() * t)
        y = states.recur(self.layer, self.size, ssm_step, t.unsqueeze(-1) * u, b, c, kept)
        y = (y + self.skip.weight.unsqueeze(-1) * u).flatten(1)
        return self._gated(y, F.silu(z.float())).to(rows.dtype)

    def _of_heads(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.described.heads // self.described.groups, 1)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        norm = self.described.norm
        if norm is None or self.norm is None:
            return y * gate
        if self.described.gates_normed:
            return self._normed(y, norm.eps, self.norm.weight) * gate
        return self._normed(y * gate, norm.eps, self.norm.weight)

    def _normed(self, y: Tensor, eps: float, weight: Tensor) -> Tensor:
        groups = y.unflatten(1, (self.described.norm_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], None, eps).flatten(1) * weight


def ssm_step(s: Tensor, u: Tensor, b: Tensor, c: Tensor, kept: Tensor) -> Tensor:
    """One token of each sequence: s [n, heads, head_dim, state_size], which it changes; u [n, heads, head_dim], scaled;
    b, c [n, heads, state_size]; the share of s that is kept, [n, heads].
    """
    s.mul_(kept[..., None, None]).addcmul_(u.unsqueeze(-1), b.unsqueeze(-2))
    return torch.matmul(s, c.unsqueeze(-1)).squeeze(-1)


def mixer_module(described: arch.Recurrent, layer: int) -> GatedDelta | Mamba2 | ShortConvolution:
    match described:
        case arch.GatedDelta():
            return GatedDelta(described, layer)
        case arch.Mamba2():
            return Mamba2(described, layer)
        case arch.ShortConvolution():
            return ShortConvolution(described, layer)

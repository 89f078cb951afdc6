"""Mixers with a recurrent state, as torch modules. Each one's formulas are those of its description. Knows no family.

States are kept and advanced in float32, whatever the model's number format. What lies between a mixer's projections is
the business of the step's states: they call the mixer's own `plain`, or a kernel.
"""

from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.models import architecture as arch
from ostro.models.cut import RecurrentShares, recurrent_shares
from ostro.torch_models.base import Module, PlainStates, StatefulContext
from ostro.torch_models.layers import ExactProjection, Projection, Vector, parameter
from ostro.torch_models.loading import Place, Taken, Weighted
from ostro.torch_models.rope import Rotation
from ostro.torch_models.shard import Shard


class Part(NamedTuple):
    """A rank's part of a mixer: all of it, if there is one rank."""

    whole: arch.Recurrent
    shard: Shard | None

    @property
    def shares(self) -> RecurrentShares | None:
        return None if self.shard is None else recurrent_shares(self.whole, self.shard.cut, self.shard.rank)

    def projections(self) -> list[Projection]:
        """The mixer's, in order; those that steer a decay are exact."""
        exact = self.whole.gates if isinstance(self.whole, arch.GatedDelta) else None
        shares = repeat(None) if self.shares is None else self.shares.projections
        return [
            (ExactProjection if each is exact else Projection)(each, share, self.shard)
            for each, share in zip(self.whole.projections, shares, strict=False)
        ]

    def convolution(self, layer: int) -> "Convolution":
        return Convolution(self.whole.conv, layer, None if self.shares is None else self.shares.channels)

    def of_heads(self, name: str, heads: int) -> Vector:
        """A number per head, of which the whole mixer has so many."""
        return _vector(name, heads, None if self.shares is None else self.shares.heads)

    def of_columns(self, name: str, size: int) -> Vector:
        """A number for each column of the last projection."""
        return _vector(name, size, None if self.shares is None else self.shares.projections[-1].columns)


def _vector(name: str, size: int, own: tuple[range, ...] | None) -> Vector:
    taken = None if own is None else Taken((size,), 0, own)
    return Vector(name, size if own is None else sum(map(len, own)), dtype=torch.float32, taken=taken)


class Convolution(Weighted):
    """A causal filter per channel, [taps, channels], in float32."""

    def __init__(self, described: arch.Convolution, layer: int, own: tuple[range, ...] | None = None) -> None:
        """With its own of the channels; None is for all of them."""
        super().__init__()
        channels = described.channels if own is None else sum(map(len, own))
        self.weight = parameter(described.taps, channels, dtype=torch.float32)
        self.bias = parameter(channels, dtype=torch.float32) if described.bias else None
        self.described, self.layer, self.own = described, layer, own

    def forward(self, x: Tensor, states: PlainStates) -> Tensor:
        """The result is in float32."""
        return states.convolve(self.layer, x, self.weight, self.bias)

    def places(self, path: str) -> dict[str, Place]:
        memory = {"weight": self.weight.data.T.unsqueeze(1)}
        if self.bias is not None:
            memory["bias"] = self.bias.data
        places = {f"{self.described.name}.{name}": Place(own) for name, own in memory.items()}
        if self.own is None:
            return places
        shapes = {tensor.name: tensor.shape for tensor in self.described.tensors()}
        return {name: replace(place, taken=Taken(shapes[name], 0, self.own)) for name, place in places.items()}


class ShortConvolution(Module):
    def __init__(self, described: arch.ShortConvolution, layer: int, shard: Shard | None = None) -> None:
        super().__init__()
        part = Part(described, shard)
        self.in_proj, self.out_proj = part.projections()
        self.conv = part.convolution(layer)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: StatefulContext, query_scales: Tensor | None = None
    ) -> Tensor:
        return self.out_proj(ctx.states.mix(self, self.in_proj(x)))

    def plain(self, states: PlainStates, rows: Tensor) -> Tensor:
        b, c, u = rows.chunk(3, -1)
        return c * self.conv(b * u, states).to(c.dtype)


class GatedDelta(Module):
    def __init__(self, described: arch.GatedDelta, layer: int, shard: Shard | None = None) -> None:
        super().__init__()
        part = Part(described, shard)
        self.in_proj, self.gates, self.out_proj = part.projections()
        self.conv = part.convolution(layer)
        self.decay, self.decay_bias = (
            part.of_heads(name, described.value_heads) for name in (described.decay, described.decay_bias)
        )
        described = described if shard is None else shard.cut.delta(described)
        heads = described.value_heads
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
    def __init__(self, described: arch.Mamba2, layer: int, shard: Shard | None = None) -> None:
        super().__init__()
        part = Part(described, shard)
        self.in_proj, self.out_proj = part.projections()
        self.conv = part.convolution(layer)
        self.decay, self.step_bias, self.skip = (
            part.of_heads(name, described.heads) for name in (described.decay, described.step_bias, described.skip)
        )
        norm = described.norm
        self.norm = None if norm is None else part.of_columns(f"{norm.name}.weight", norm.size)
        self.sharing = None
        if shard is not None and described.norm_groups < shard.cut.ranks:
            self.sharing = SharedGroups(described.norm_groups, described.width, shard)
        described = described if shard is None else shard.cut.mamba(described)
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
        if self.sharing is not None:
            return y * torch.rsqrt(self.sharing.mean_squares(y) + eps) * weight
        groups = y.unflatten(1, (self.described.norm_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], None, eps).flatten(1) * weight


class SharedGroups(NamedTuple):
    """Groups that are normed each by itself, where each rank has a part of one: they add up their sums of squares."""

    groups: int
    width: int
    """That of all groups."""
    shard: Shard

    def mean_squares(self, y: Tensor) -> Tensor:
        """The mean square of the rank's group, for each row."""
        own = self.shard.rank * self.groups // self.shard.cut.ranks
        squares = y.new_zeros(len(y), self.groups)
        squares[:, own] = y.square().sum(1)
        return self.shard.group.sum(squares)[:, own : own + 1] / (self.width // self.groups)


def ssm_step(s: Tensor, u: Tensor, b: Tensor, c: Tensor, kept: Tensor) -> Tensor:
    """One token of each sequence: s [n, heads, head_dim, state_size], which it changes; u [n, heads, head_dim], scaled;
    b, c [n, heads, state_size]; the share of s that is kept, [n, heads].
    """
    s.mul_(kept[..., None, None]).addcmul_(u.unsqueeze(-1), b.unsqueeze(-2))
    return torch.matmul(s, c.unsqueeze(-1)).squeeze(-1)


def mixer_module(
    described: arch.Recurrent, layer: int, shard: Shard | None = None
) -> GatedDelta | Mamba2 | ShortConvolution:
    """The description is of the whole mixer in either case."""
    match described:
        case arch.GatedDelta():
            return GatedDelta(described, layer, shard)
        case arch.Mamba2():
            return Mamba2(described, layer, shard)
        case arch.ShortConvolution():
            return ShortConvolution(described, layer, shard)

"""A mixture of experts as torch modules. Knows no family.

    x ── router ── the experts of each token, their weights
    rows of x, one per token and expert, sorted by expert ── gate and up ── down ── weighted sums, token by token

A token's sum adds its experts in the order in which the router ranks them, whatever other tokens a step has.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.models import architecture as arch
from ostro.torch_models.base import Module
from ostro.torch_models.layers import ACTIVATIONS, GatedMLP, Projection, RMSNorm, Vector, gating, mlp_module, parameter
from ostro.torch_models.loading import Picked, Place, Weighted

_ALIGNMENT = 8
"""`grouped_mm` takes bfloat16 rows whose lengths are multiples of 16 bytes."""
MOST_SLOTS = 1 << 15
"""Rows computed at a time, one per token and expert: a step of many tokens would take too much memory for all."""


def route(logits: Tensor, chosen: int, *, normalized: bool, scales_inputs: bool = False) -> tuple[Tensor, Tensor]:
    """Each row's experts, highest logit first, and their weights in float32: see `arch.Experts`."""
    # A stable sort, because topk picks any of several equal logits.
    ranked, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    if scales_inputs:
        return experts[:, :chosen], ranked[:, :chosen].sigmoid()
    # The softmax over the chosen alone is their share of the full softmax, normalised to one.
    weights = ranked[:, :chosen].softmax(-1) if normalized else ranked.softmax(-1)[:, :chosen]
    return experts[:, :chosen], weights


def route_by_sigmoids(
    logits: Tensor, chosen: int, routing: arch.SigmoidRouting, bias: Tensor | None, *, normalized: bool
) -> tuple[Tensor, Tensor]:
    """The same by sigmoids, highest first with the bias that counts for the choice alone."""
    scores = logits.float().sigmoid()
    ranked = scores if bias is None else scores + bias
    experts = ranked.argsort(dim=-1, descending=True, stable=True)[:, :chosen]
    weights = scores.gather(1, experts)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    return experts, weights * routing.scale


class ExpertMatrices(Weighted):
    """A matrix per expert, [experts, out, in], and a bias if the family has any, [experts, out]."""

    def __init__(self, described: arch.ExpertMatrices) -> None:
        super().__init__()
        self.weight = parameter(described.experts, described.rows, described.columns)
        self.bias = None if described.bias is None else parameter(described.experts, described.rows)
        self.described = described

    @property
    def is_grouped(self) -> bool:
        """Whether one kernel multiplies the rows of all experts."""
        weight = self.weight
        aligned = not any(size % _ALIGNMENT for size in weight.shape[1:])
        return weight.is_cuda and weight.dtype == torch.bfloat16 and aligned

    def forward(self, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Rows, sorted by their `experts`, each times its expert's matrix. `ends` has the end of each expert's rows, as
        int32.
        """
        out = self._products(x, ends)
        return out if self.bias is None else out.add_(self.bias[experts])

    def _products(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.is_grouped:
            return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        out = x.new_empty(len(x), self.weight.shape[1])
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                torch.mm(x[start:end], self.weight[expert].T, out=out[start:end])
            start = end
        return out

    def places(self, path: str) -> dict[str, Place]:
        described, places = self.described, dict[str, Place]()
        sizes = [part.rows for part in described.parts]
        for part, rows in zip(described.parts, self.weight.data.split(sizes, 1), strict=True):
            memory = rows.transpose(1, 2) if described.transposed else rows
            places |= _places(described.weight_names(part), part, memory, dim=2 if described.transposed else 1)
        if self.bias is not None:
            for part, rows in zip(described.parts, self.bias.data.split(sizes, 1), strict=True):
                biases = _places(described.bias_names(part), part, rows, dim=1)
                places |= {name: replace(place, stacks_vectors=True) for name, place in biases.items()}
        return places


def _places(names: list[str], part: arch.Part, memory: Tensor, *, dim: int) -> dict[str, Place]:
    """The places of one part of all experts, whose rows lie along `dim` of the memory."""
    order = None if part.order is None else tuple(part.order.stored(part.rows))
    if arch.is_stacked(part):
        [name] = names
        return {name: Place(memory, taken=None if order is None else Picked(tuple(memory.shape), order, dim))}
    picked = None if order is None else Picked(tuple(memory.shape[1:]), order, dim - 1)
    return {name: Place(own, taken=picked) for name, own in zip(names, memory, strict=True)}


class Experts(Module):
    def __init__(self, described: arch.Experts) -> None:
        super().__init__()
        self.router = Projection(described.whole_router)
        self.up, self.down = ExpertMatrices(described.up), ExpertMatrices(described.down)
        scales = described.weight_scales
        self.scales = None if scales is None else Vector(scales, described.count)
        bias = None if described.sigmoid is None else described.sigmoid.choice_bias
        self.choice_bias = None if bias is None else Vector(bias, described.count, dtype=torch.float32)
        self.shared = None if described.shared is None else mlp_module(described.shared)
        self.sigmoid = described.sigmoid
        self.act = _activating(described)
        self.count, self.chosen, self.normalized = described.count, described.chosen, described.normalized
        self.is_gated, self.scales_inputs = described.shared_gate is not None, described.scales_inputs

    @property
    def num_active(self) -> int:
        """Number of weights in the experts that a token uses."""
        return (self.up.weight.numel() + self.down.weight.numel()) * self.chosen // self.count

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """`routed` is what the router reads, if it is not x."""
        logits, most = self._logits(x if routed is None else routed), max(1, MOST_SLOTS // self.chosen)
        parts = zip(x.split(most), logits[:, : self.count].split(most), strict=True)
        total = torch.cat([self.mixed(*part) for part in parts])
        if self.shared is None:
            return total
        rows: Tensor = self.shared(x)
        return total.add_(rows.mul_(torch.sigmoid(logits[:, self.count :])) if self.is_gated else rows)

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        """The weighted sum of the chosen experts, without the shared one, given the router's logits."""
        experts, weights = self._routed(logits)
        if self.scales is not None:
            weights = weights * self.scales.weight[experts]
        in_order, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.count, device=x.device)
        ends = torch.searchsorted(in_order, numbers, right=True, out_int32=True)
        read = x[order // self.chosen]
        if self.scales_inputs:
            read.mul_(weights.flatten()[order].to(x.dtype).unsqueeze(1))
        rows = self.down(self.act(self.up(read, in_order, ends)), in_order, ends)
        # Back to the order of tokens, and of each token's experts.
        by_token = torch.empty_like(rows).index_copy_(0, order, rows).view(len(x), self.chosen, -1)
        if self.scales_inputs:
            return by_token.sum(1)
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), by_token).squeeze(1)

    def _logits(self, x: Tensor) -> Tensor:
        if self.sigmoid is None or not self.sigmoid.exact:
            return self.router(x)
        bias = self.router.bias
        return F.linear(x.float(), self.router.weight.float(), None if bias is None else bias.float())

    def _routed(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.sigmoid is None:
            return route(logits, self.chosen, normalized=self.normalized, scales_inputs=self.scales_inputs)
        bias = None if self.choice_bias is None else self.choice_bias.weight
        return route_by_sigmoids(logits, self.chosen, self.sigmoid, bias, normalized=self.normalized)


def _activating(described: arch.Experts) -> Callable[[Tensor], Tensor]:
    """Turns what `up` computes into inner states."""
    if not described.gated:
        return ACTIVATIONS[described.activation]
    gate = gating(described.activation)
    return lambda both: gate(*both.chunk(2, -1))


CpuSums = Callable[[Tensor, Tensor, Tensor, Tensor], Callable[[], Tensor]]
"""Begins to compute rows' weighted sums of experts, [rows, out] in float32, from the rows, each one's experts and their
weights. The fourth tensor is below zero for rows that only pad, whose sums are zeros. The result waits for the sums.
"""


class CpuExperts(Module):
    """A mixture whose experts are on the CPU, beside a model on a GPU."""

    def __init__(self, described: arch.Experts) -> None:
        super().__init__()
        self.router = Projection(described.whole_router)
        self.shared = None if described.shared is None else GatedMLP(described.shared)
        self.described = described
        # Set by the backend.
        self.begin: CpuSums | None = None
        self.formats = ""
        """The formats of all such experts' weights, in words."""

    @property
    def num_active(self) -> int:
        """As of `Experts`."""
        described = self.described
        return described.chosen * sum(each.rows * each.columns for each in (described.up, described.down))

    def forward(self, x: Tensor) -> Tensor:
        described = self.described
        assert self.begin is not None
        logits = self.router(x)
        chosen = route(logits[:, : described.count], described.chosen, normalized=described.normalized)
        experts, weights = (each.contiguous() for each in chosen)
        wait = self.begin(x, experts, weights, torch.zeros(len(x), dtype=torch.int64, device=x.device))
        rows = None if self.shared is None else self.shared(x)
        total = wait().to(x.dtype)
        if rows is None:
            return total
        return total.add_(rows if described.shared_gate is None else rows.mul_(logits[:, described.count :].sigmoid()))


class SideExperts(Module):
    """Experts beside a layer's MLP.

    x ── mlp_norm ── MLP ────────────── norm of its rows ──┐
    x ── norm ──┬── experts ─────────── post_norm ─────────┴── sum
    x ── router's norm ── router ──┘
    """

    def __init__(self, described: arch.SideExperts) -> None:
        super().__init__()
        self.experts = Experts(described.experts)
        self.mlp_norm, self.norm = RMSNorm(described.mlp_norm), RMSNorm(described.norm)
        self.post_norm = RMSNorm(described.post_norm)
        self.router_weight = Vector(described.router_weight, described.norm.size)
        self.router_scale, self.eps = described.router_scale, described.norm.eps

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """`rows` are what the MLP computed."""
        weight = self.router_weight.weight
        routed = F.rms_norm(x, weight.shape, weight, self.eps).mul_(self.router_scale)
        mixed: Tensor = self.post_norm(self.experts(self.norm(x), routed))
        return mixed.add_(self.mlp_norm(rows))

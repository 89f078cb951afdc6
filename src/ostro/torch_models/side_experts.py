"""Experts beside a layer's MLP, as torch modules. Knows no family.

x ── mlp_norm ── MLP ────────────── norm of its rows ──┐
x ── norm ──┬── experts ─────────── post_norm ─────────┴── sum
x ── router's norm ── router ──┘
"""

import torch.nn.functional as F
from torch import Tensor

from ostro.models import architecture as arch
from ostro.torch_models.base import Module
from ostro.torch_models.experts import Experts
from ostro.torch_models.layers import RMSNorm, Vector


class SideExperts(Module):
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

"""Inputs that each layer has of its own, as torch modules. Knows no family.

ids ── table ──────────────────────┐
embedded ids ── projection ── norm ┴── sum ── [tokens, layers, width]
a layer's result ── gate ── times its input ── output ── norm ── added to the stream
"""

from torch import Tensor

from ostro.models import architecture as arch
from ostro.torch_models.base import Module
from ostro.torch_models.layers import ACTIVATIONS, Embedding, Projection, RMSNorm


class Table(Embedding):
    """Rows that are looked up and never multiplied."""

    def pack(self) -> None:
        """Nothing to do: the other layout is for products."""


class LayerInputs(Module):
    """The inputs of all layers."""

    def __init__(self, described: arch.LayerInputs) -> None:
        super().__init__()
        name, rows, _ = described.table
        self.table = Table(name, rows, described.projection.rows, scale=described.table_scale)
        self.projection = Projection(described.projection)
        self.norm = RMSNorm(described.norm)
        self.width, self.projection_scale, self.scale = described.width, described.projection_scale, described.scale

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """x are the ids' embeddings."""
        projected = self.projection(x).mul_(self.projection_scale).unflatten(1, (-1, self.width))
        return (self.norm(projected) + self.table(ids).view_as(projected)).mul_(self.scale)


class LayerInput(Module):
    """What one layer adds to the stream because of its input."""

    def __init__(self, described: arch.LayerInput) -> None:
        super().__init__()
        self.gate, self.output = Projection(described.gate), Projection(described.output)
        self.norm = RMSNorm(described.norm)
        self.act = ACTIVATIONS[described.activation]

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        return self.norm(self.output(self.act(self.gate(x)) * own))

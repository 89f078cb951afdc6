"""Attention of a layer that has no keys and values: it reads those of an earlier layer. Knows no family."""

from torch import Tensor

from ostro.models import architecture as arch
from ostro.torch_models.base import AttentionContext, Module
from ostro.torch_models.layers import Projection, RMSNorm
from ostro.torch_models.rope import Rotation


class ReadingAttention(Module):
    def __init__(self, described: arch.Attention, layer: int, shape: arch.ModelShape) -> None:
        """`shape` is that of the whole model; `layer` is the one whose keys and values are read."""
        super().__init__()
        self.layer, self.spec, self.head_dim = layer, described.spec, shape.of_layer(layer).head_dim
        self.q_proj = Projection(described.qkv)
        self.q_norm = None if described.query_norm is None else RMSNorm(described.query_norm)
        self.o_proj = Projection(described.output)

    def forward(
        self, x: Tensor, rotation: Rotation | None, ctx: AttentionContext, query_scales: Tensor | None = None
    ) -> Tensor:
        q: Tensor = self.q_proj(x).view(x.shape[0], -1, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if rotation is not None:
            q = rotation(q)
        if query_scales is not None:
            q = q * query_scales
        return self.o_proj(ctx.attend_stored(self.layer, q, self.spec))

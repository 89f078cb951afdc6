"""OLMo-2: what a layer adds is normed, not what it reads; queries and keys are normed over all heads together."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.models.base import AttentionContext, AttentionSpec, ModelShape, Module
from ostro.models.config import ConfigReader
from ostro.models.decoder import CausalLM, assemble, model_shape
from ostro.models.layers import Attention, GatedMLP, RMSNorm, parameter
from ostro.models.loading import Place, Weighted
from ostro.models.rope import Rotation


def build_olmo2(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    shape = model_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5)
    bias, eps = config.flag("attention_bias", False), config.number("rms_norm_eps")
    norm = partial(RMSNorm, shape.hidden_size, eps)
    inner, act = config.integer("intermediate_size"), config.text("hidden_act", "silu")
    layers = [
        PostNormLayer(
            Attention(layer, shape, spec, qkv_bias=bias, o_bias=bias, qk_norm=WidthNorm(shape, eps)),
            GatedMLP(shape.hidden_size, inner, act=act),
            norm,
        )
        for layer in range(shape.num_layers)
    ]
    return assemble(config, shape, layers, norm)


class PostNormLayer(Module):
    """Attention and MLP each read the stream as it is, and add normed results to it, in place."""

    def __init__(self, attention: Attention, mlp: GatedMLP, norm: Callable[[], RMSNorm]) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = norm()

    def forward(self, x: Tensor, rotation: Rotation, ctx: AttentionContext) -> Tensor:
        x += self.post_attention_layernorm(self.self_attn(x, rotation, ctx))
        x += self.post_feedforward_layernorm(self.mlp(x))
        return x


class WidthNorm(Weighted):
    """RMSNorm of all query heads as one vector, and of all key heads as another."""

    def __init__(self, shape: ModelShape, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.widths = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
        self.q_weight, self.k_weight = (parameter(width) for width in self.widths)

    def forward(self, qk: Tensor) -> Tensor:
        q, k = qk.flatten(1).split(self.widths, 1)
        q = F.rms_norm(q, self.q_weight.shape, self.q_weight, self.eps)
        k = F.rms_norm(k, self.k_weight.shape, self.k_weight, self.eps)
        return torch.cat((q, k), 1).view(qk.shape)

    def places(self, path: str) -> dict[str, Place]:
        parent = path.rpartition(".")[0]
        return {
            f"{parent}.q_norm.weight": Place(self.q_weight.data),
            f"{parent}.k_norm.weight": Place(self.k_weight.data),
        }

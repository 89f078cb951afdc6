"""HRM-Text: two stacks of layers that run again and again over the same tokens, the low one several times a high one.

    cycle         low  low  low  HIGH │ low  low  low  HIGH        H_cycles 2, L_cycles 3, two layers a stack
    KV slots      0-1  2-3  4-5  6-7  │ 8-9  …              14-15

What a layer sees differs from run to run, so each run keeps keys and values of its own: there are as many slots as
runs of layers, and pages are sized by them.

Attention is causal, as it is in transformers for a prompt without token types. Models with `prefix_lm` were trained on
prompts that see all of themselves, and transformers does so on request; that is not served.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from ostro.models.base import AttentionContext, AttentionSpec, ModelShape, Module
from ostro.models.config import ConfigReader
from ostro.models.decoder import CausalLM, model_shape
from ostro.models.layers import Embedding, FusedLinear, GatedMLP, Linear, parameter
from ostro.models.loading import Place, Weighted
from ostro.models.rope import Rotary, Rotation
from ostro.models.rope_settings import rope_settings


def build_hrm_text(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    high_cycles, low_cycles = config.integer("H_cycles", 2), config.integer("L_cycles", 3)
    shape = model_shape(config, max_seq_len)
    # Files of transformers tell the slots as num_hidden_layers, and the layers of a stack apart; others only those.
    depth = config.integer("num_layers_per_stack", shape.num_layers)
    shape = replace(
        shape,
        num_layers=depth * high_cycles * (low_cycles + 1),
        num_kv_heads=shape.num_heads,
        head_dim=config.integer("head_dim", 128),
    )
    low, high = (Stack([_layer(config, shape) for _ in range(depth)], config.number("rms_norm_eps")) for _ in range(2))
    backbone = HrmTextBackbone(
        Embedding(shape.vocab_size, shape.hidden_size),
        low,
        high,
        Rotary(rope_settings(config), head_dim=shape.head_dim, max_seq_len=shape.max_seq_len),
        embedding_scale=config.optional_number("embedding_scale") or 1.0 / config.number("initializer_range", 0.02),
        high_cycles=high_cycles,
        low_cycles=low_cycles,
    )
    return CausalLM(shape, backbone, backbone.embed_tokens, tied=config.flag("tie_word_embeddings", False))


class PlainNorm(Module):
    """RMSNorm without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.eps)


class StoredWhole(FusedLinear):
    """Checkpoints hold its weight as one, and its biases by their parts."""

    def places(self, path: str) -> dict[str, Place]:
        biases = {name: place for name, place in super().places(path).items() if name.endswith(".bias")}
        return {f"{_stored(path)}.weight": Place(self.weight.data), **biases}


class OutLinear(Linear):
    def places(self, path: str) -> dict[str, Place]:
        return super().places(_stored(path))


class GatedAttention(Module):
    """Attention whose result is scaled by a sigmoid gate of the same input, before it is projected."""

    def __init__(self, shape: ModelShape, *, bias: bool) -> None:
        super().__init__()
        self.spec = AttentionSpec(scale=shape.head_dim**-0.5)
        self.head_dim, self.width = shape.head_dim, shape.num_heads * shape.head_dim
        self.gate_qk_v = (shape.num_heads, 2 * shape.num_heads, shape.num_heads)
        parts = dict.fromkeys(("gate_proj", "q_proj", "k_proj", "v_proj"), self.width)
        self.gqkv_proj = StoredWhole(shape.hidden_size, parts, bias=bias)
        self.o_proj = OutLinear(self.width, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: Rotation, slot: int, ctx: AttentionContext) -> Tensor:
        projected = self.gqkv_proj(x)
        _, qk, v = projected.view(x.shape[0], -1, self.head_dim).split_with_sizes(self.gate_qk_v, 1)
        q, k = rotation(qk).chunk(2, 1)
        seen = ctx.attend(slot, q, k, v, self.spec)
        return self.o_proj(projected[:, : self.width].sigmoid().mul_(seen))


class HrmTextLayer(Module):
    """Attention and MLP each read the normed stream and add to it, in place."""

    def __init__(self, attention: GatedAttention, mlp: GatedMLP, norm: PlainNorm) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.norm = norm

    def forward(self, x: Tensor, rotation: Rotation, slot: int, ctx: AttentionContext) -> Tensor:
        x += self.self_attn(self.norm(x), rotation, slot, ctx)
        x += self.mlp(self.norm(x))
        return x


class Stack(Module):
    def __init__(self, layers: Sequence[HrmTextLayer], eps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = PlainNorm(eps)

    def forward(self, x: Tensor, rotation: Rotation, first_slot: int, ctx: AttentionContext) -> Tensor:
        """Writes to x. The layers' keys and values go to the slots from the first on."""
        for slot, layer in enumerate(self.layers, first_slot):
            x = layer(x, rotation, slot, ctx)
        return self.norm(x)


class HrmTextBackbone(Weighted):
    def __init__(
        self,
        embedding: Embedding,
        low: Stack,
        high: Stack,
        rope: Rotary,
        *,
        embedding_scale: float,
        high_cycles: int,
        low_cycles: int,
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.z_L_init = parameter(embedding.weight.shape[1])
        self.L_module = low
        self.H_module = high
        self.rope = rope
        self.embedding_scale = embedding_scale
        # Which stack runs, in order: the low one, several times, then the high one.
        self.is_high = ([False] * low_cycles + [True]) * high_cycles

    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        high, low = self.embed_tokens(ids) * self.embedding_scale, self.z_L_init
        rotation = self.rope(positions, high.dtype)
        depth = len(self.H_module.layers)
        for run, is_high in enumerate(self.is_high):
            if is_high:
                high = self.H_module(high + low, rotation, run * depth, ctx)
            else:
                low = self.L_module(high + low, rotation, run * depth, ctx)
        return high


def _layer(config: ConfigReader, shape: ModelShape) -> HrmTextLayer:
    inner, mlp_bias = config.integer("intermediate_size"), config.flag("mlp_bias", False)
    mlp = GatedMLP(shape.hidden_size, inner, act=config.text("hidden_act", "silu"), bias=mlp_bias)
    mlp.gate_up_proj = StoredWhole(shape.hidden_size, mlp.gate_up_proj.parts, bias=mlp_bias)
    attention = GatedAttention(shape, bias=config.flag("attention_bias", False))
    return HrmTextLayer(attention, mlp, PlainNorm(config.number("rms_norm_eps")))


def _stored(path: str) -> str:
    """Where checkpoints keep a module: attention has one name there, and another in transformers and in adapters."""
    return path.replace(".self_attn.", ".attn.")

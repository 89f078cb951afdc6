"""Gemma 2 and Gemma 3 (text): norms before and after each half, scaled embeddings, windows on most layers.

Norm weights are stored as their difference from one. Gemma 2 caps scores and logits; Gemma 3 norms query and key heads
instead, and gives the windowed layers a rope of their own.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ostro.errors import UnsupportedModel
from ostro.models.base import AttentionContext, AttentionSpec, ModelShape, Module
from ostro.models.config import ConfigReader
from ostro.models.decoder import Backbone, CausalLM, model_shape, sliding_layers
from ostro.models.layers import Attention, Embedding, GatedMLP, HeadNorm, RMSNorm
from ostro.models.rope import Rotary, Rotation
from ostro.models.rope_settings import RopeSettings, full_and_sliding_ropes, rope_settings


def build_gemma2(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    shape = model_shape(config, max_seq_len)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer % 2 == 0)
    attentions = [_attention(config, shape, layer, slides=slides[layer]) for layer in range(shape.num_layers)]
    return _around(config, shape, attentions, [rope_settings(config)], rope_of_layer=None)


def build_gemma3(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("Gemma with bidirectional attention is not supported; only its causal models are.")
    shape = model_shape(config, max_seq_len)
    period = config.integer("sliding_window_pattern", 6)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: (layer + 1) % period != 0)
    eps = config.number("rms_norm_eps")
    attentions = [
        _attention(config, shape, layer, slides=slides[layer], qk_norm=HeadNorm(shape, eps, offset=1.0))
        for layer in range(shape.num_layers)
    ]
    return _around(config, shape, attentions, full_and_sliding_ropes(config), rope_of_layer=[int(s) for s in slides])


class SandwichLayer(Module):
    """Attention and MLP each read the normed stream, and add normed results to it, in place."""

    def __init__(self, attention: Attention, mlp: GatedMLP, norm: Callable[[], RMSNorm]) -> None:
        super().__init__()
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = norm()

    def forward(self, x: Tensor, rotation: Rotation, ctx: AttentionContext) -> Tensor:
        x += self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation, ctx))
        x += self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x


class ScaledEmbedding(Embedding):
    """Scales by √size, rounded to the weights' dtype as in training: 55.5 and not 55.4256 in bfloat16."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__(vocab_size, size)
        self.scale = torch.tensor(size**0.5, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mul_(self.scale)


def _attention(
    config: ConfigReader, shape: ModelShape, layer: int, *, slides: bool, qk_norm: HeadNorm | None = None
) -> Attention:
    spec = AttentionSpec(
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        window=config.optional_integer("sliding_window") if slides else None,
        softcap=config.optional_number("attn_logit_softcapping"),
    )
    bias = config.flag("attention_bias", False)
    return Attention(layer, shape, spec, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)


def _around(
    config: ConfigReader,
    shape: ModelShape,
    attentions: Sequence[Attention],
    ropes: Sequence[RopeSettings],
    rope_of_layer: Sequence[int] | None,
) -> CausalLM:
    norm = partial(RMSNorm, shape.hidden_size, config.number("rms_norm_eps"), offset=1.0)
    inner, act = config.integer("intermediate_size"), config.text("hidden_activation", "gelu_pytorch_tanh")
    layers = [SandwichLayer(attention, GatedMLP(shape.hidden_size, inner, act=act), norm) for attention in attentions]
    embedding = ScaledEmbedding(shape.vocab_size, shape.hidden_size)
    rotaries = [Rotary(rope, head_dim=shape.head_dim, max_seq_len=shape.max_seq_len) for rope in ropes]
    return CausalLM(
        shape,
        Backbone(embedding, layers, norm(), rotaries, rope_of_layer),
        embedding,
        tied=config.flag("tie_word_embeddings", True),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )

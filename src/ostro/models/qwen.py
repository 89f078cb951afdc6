"""Qwen 2, 2.5 and 3: Llama's shape, with windows on some layers.

Qwen 2 has biases on queries, keys and values; Qwen 3 norms query and key heads instead.
"""

from functools import partial

from ostro.models.base import AttentionSpec, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.decoder import CausalLM, PreNormLayer, assemble, model_shape, sliding_layers
from ostro.models.layers import Attention, GatedMLP, HeadNorm, RMSNorm


def build_qwen2(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    shape = model_shape(config, max_seq_len)
    specs = _attention_specs(config, shape)
    return _around(config, shape, [Attention(i, shape, spec, qkv_bias=True) for i, spec in enumerate(specs)])


def build_qwen3(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    shape = model_shape(config, max_seq_len)
    bias, eps = config.flag("attention_bias", False), config.number("rms_norm_eps")
    attentions = [
        Attention(i, shape, spec, qkv_bias=bias, o_bias=bias, qk_norm=HeadNorm(shape, eps))
        for i, spec in enumerate(_attention_specs(config, shape))
    ]
    return _around(config, shape, attentions)


def _attention_specs(config: ConfigReader, shape: ModelShape) -> list[AttentionSpec]:
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    full_layers = config.integer("max_window_layers", shape.num_layers)
    sliding = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer >= full_layers)
    scale = shape.head_dim**-0.5
    return [AttentionSpec(scale=scale, window=window if slides else None) for slides in sliding]


def _around(config: ConfigReader, shape: ModelShape, attentions: list[Attention]) -> CausalLM:
    norm = partial(RMSNorm, shape.hidden_size, config.number("rms_norm_eps"))
    inner, act = config.integer("intermediate_size"), config.text("hidden_act", "silu")
    layers = [PreNormLayer(attention, GatedMLP(shape.hidden_size, inner, act=act), norm) for attention in attentions]
    return assemble(config, shape, layers, norm)

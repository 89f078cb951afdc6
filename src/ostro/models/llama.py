"""Llama 1 to 3.x and what shares its shape: SmolLM2, and Mistral with its sliding window."""

from functools import partial

from ostro.models.base import AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.decoder import CausalLM, PreNormLayer, assemble, model_shape
from ostro.models.layers import Attention, GatedMLP, RMSNorm


def build_llama(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    return _build(config, max_seq_len, window=None)


def build_mistral(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    return _build(config, max_seq_len, window=config.optional_integer("sliding_window"))


def _build(config: ConfigReader, max_seq_len: int | None, *, window: int | None) -> CausalLM:
    shape = model_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=window)
    norm = partial(RMSNorm, shape.hidden_size, config.number("rms_norm_eps"))
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    inner, act = config.integer("intermediate_size"), config.text("hidden_act", "silu")
    layers = [
        PreNormLayer(
            Attention(layer, shape, spec, qkv_bias=attention_bias, o_bias=attention_bias),
            GatedMLP(shape.hidden_size, inner, act=act, bias=mlp_bias),
            norm,
        )
        for layer in range(shape.num_layers)
    ]
    return assemble(config, shape, layers, norm)

"""Phi-3 and Phi-4-mini: Llama's shape, stored with its projections already fused, and with longrope."""

from functools import partial

from ostro.models.base import AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.decoder import CausalLM, PreNormLayer, assemble, model_shape
from ostro.models.layers import Attention, GatedMLP, RMSNorm


def build_phi3(config: ConfigReader, max_seq_len: int | None) -> CausalLM:
    shape = model_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=config.optional_integer("sliding_window"))
    norm = partial(RMSNorm, shape.hidden_size, config.number("rms_norm_eps"))
    inner, act = config.integer("intermediate_size"), config.text("hidden_act", "silu")
    layers = [
        PreNormLayer(
            Attention(layer, shape, spec, stored_fused=True),
            GatedMLP(shape.hidden_size, inner, act=act, stored_fused=True),
            norm,
        )
        for layer in range(shape.num_layers)
    ]
    return assemble(config, shape, layers, norm)

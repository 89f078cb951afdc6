"""Phi-3 and Phi-4-mini: Llama's shape with a window, stored with its projections already fused."""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=config.optional_integer("sliding_window"))
    act = activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(layer.attention(spec, stored_fused=True), layer.gated_mlp(act, stored_fused=True))
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)

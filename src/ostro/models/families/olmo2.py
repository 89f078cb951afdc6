"""OLMo-2: what a layer adds is normed, not what it reads; queries and keys are normed over all heads together."""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5)
    bias, act = config.flag("attention_bias", False), activation(config, "hidden_act", "silu")
    layers = [
        layer.post_norm(
            layer.attention(spec, qkv_bias=bias, output_bias=bias, qk_norm=layer.width_norms()), layer.gated_mlp(act)
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)

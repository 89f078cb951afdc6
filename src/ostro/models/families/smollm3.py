"""SmolLM3: Llama, but every fourth layer does not rotate queries and keys."""

from dataclasses import replace

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import llama
from ostro.models.families.common import (
    activation,
    decoder,
    decoder_shape,
    hub_layers,
    rotating_layers,
    sliding_layers,
)
from ostro.models.family import Family

_THETA = 2e6


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = ConfigReader({"rope_theta": _THETA, **config.values}, config.source)
    shape = decoder_shape(config, max_seq_len)
    rotates = rotating_layers(config, shape.num_layers)
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: not rotates[layer])
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    act = activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(
            layer.attention(
                AttentionSpec(scale=shape.head_dim**-0.5, window=window if slides[layer.index] else None),
                rope=0 if rotates[layer.index] else None,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
            ),
            layer.gated_mlp(act, bias=mlp_bias),
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


FAMILY = Family(
    "SmolLM3",
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3Model",
    describe,
    tied=True,
    gguf=replace(llama.GGUF, architecture="smollm3"),
)

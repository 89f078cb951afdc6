"""SmolLM3: Llama, but every fourth layer does not rotate queries and keys."""

from dataclasses import replace

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import llama
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers, sliding_layers
from ostro.models.family import Family
from ostro.models.limits import MOST_LAYERS

_THETA = 2e6


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = ConfigReader({"rope_theta": _THETA, **config.values}, config.source)
    shape = decoder_shape(config, max_seq_len)
    rotates = _rotating_layers(config, shape.num_layers)
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


def _rotating_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    # Despite the name, 1 means that the layer rotates.
    rotates = config.flags("no_rope_layers")
    if not rotates:
        interval = config.integer("no_rope_layer_interval", 4, most=MOST_LAYERS)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(rotates) != num_layers:
        raise config.bad("no_rope_layers", list(rotates), f"a list of {num_layers}, one for each layer")
    return rotates


FAMILY = Family(
    "SmolLM3",
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3Model",
    describe,
    tied=True,
    gguf=replace(llama.GGUF, architecture="smollm3"),
)

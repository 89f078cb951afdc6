"""OLMo-3: OLMo-2 with sliding windows in three of every four layers. Rope scaling applies only to the others.

GGUF files call it OLMo-2; `olmo2` tells them apart.
"""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers, sliding_layers
from ostro.models.family import Family
from ostro.models.rope_settings import full_and_sliding_ropes

_THETA, _WINDOW, _PERIOD = 5e5, 4096, 4


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    theta = config.number("rope_theta", _THETA)
    ropes = full_and_sliding_ropes(config, theta=theta, sliding_theta=theta)
    shape = decoder_shape(config, max_seq_len, ropes[0])
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: (layer + 1) % _PERIOD != 0)
    window = config.integer("sliding_window", _WINDOW)
    bias, act = config.flag("attention_bias", False), activation(config, "hidden_act", "silu")
    layers = [
        layer.post_norm(
            layer.attention(
                AttentionSpec(scale=shape.head_dim**-0.5, window=window if sliding else None),
                rope=int(sliding),
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=layer.width_norms(),
            ),
            layer.gated_mlp(act),
        )
        for layer, sliding in zip(hub_layers(config, shape), slides, strict=True)
    ]
    return decoder(config, shape, layers, ropes=ropes)


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    return levanter.llama_config(settings, head_dim) | {
        "sliding_window": settings.integer("sliding_window"),
        "layer_types": settings.get("layer_types"),
    }


FAMILY = Family(
    "OLMo-3",
    "olmo3",
    "Olmo3ForCausalLM",
    "Olmo3Model",
    describe,
    levanter=(
        levanter.LevanterNames(
            type="olmo3",
            defaults={**levanter.LLAMA, "sliding_window": _WINDOW},
            own_settings=frozenset({"attention_bias"}),
            head_dim="set",
            config=_levanter_config,
        ),
    ),
)

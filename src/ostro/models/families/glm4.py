"""GLM-4 (0414): norms before and after attention and MLP, biases on queries, keys and values, and half of each head
rotated, neighbouring dimensions together.
"""

from dataclasses import replace

from ostro.models.architecture import Architecture, AttentionSpec, Layer
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import HubLayer, activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family
from ostro.models.rope_settings import rope_settings
from ostro.models.row_order import Pairs

_ROTATED = 0.5


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = ConfigReader({"partial_rotary_factor": _ROTATED, **config.values}, config.source)
    shape = decoder_shape(config, max_seq_len)
    spec, bias = AttentionSpec(scale=shape.head_dim**-0.5), config.flag("attention_bias", True)
    order = Pairs(shape.head_dim, rope_settings(config).rotary_dim(shape.head_dim))
    act = activation(config, "hidden_act", "silu")
    layers = [
        _normed(
            layer,
            layer.pre_norm(layer.attention(spec, qkv_bias=bias, order=order), layer.gated_mlp(act, stored_fused=True)),
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


def _normed(names: HubLayer, layer: Layer) -> Layer:
    return replace(
        layer,
        attention_post_norm=names.norm("post_self_attn_layernorm"),
        mlp_post_norm=names.norm("post_mlp_layernorm"),
    )


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    head_dim = gguf.head_dim(facts)
    return gguf.decoder_config(facts) | {
        "partial_rotary_factor": facts.integer("rope.dimension_count", head_dim) / max(head_dim, 1),
    }


FAMILY = Family(
    "GLM-4 (0414)",
    "glm4",
    "Glm4ForCausalLM",
    "Glm4Model",
    describe,
    gguf=gguf.GgufNames(
        "glm4",
        gguf.ATTENTION
        | gguf.PRE_NORMS
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _gguf_config,
    ),
)

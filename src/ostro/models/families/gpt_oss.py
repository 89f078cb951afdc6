"""gpt-oss: a mixture of experts in every layer, biases everywhere, attention sinks, and sliding windows on every other
layer. Gates and ups are clamped.
"""

from dataclasses import replace
from reprlib import repr as shown

from ostro.errors import UnsupportedModel
from ostro.models.architecture import CLAMP, SLOPE, Architecture, AttentionSpec, Experts, Sinks
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import (
    STORED_APART,
    ExpertNames,
    HubLayer,
    Mixture,
    decoder,
    decoder_shape,
    hub_layers,
    mixture,
    sliding_layers,
)
from ostro.models.family import Family
from ostro.models.rope_settings import rope_settings
from ostro.models.row_order import ByTurns

_THETA = 150000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_STACKED = ExpertNames(router="mlp.router", up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
# The names in GGUF files.
_APART = ExpertNames(router="mlp.router")
_SINKS = "self_attn.sinks"


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    _check_activation(config)
    table = config.table("rope_parameters") or config.table("rope_scaling") or _ROPE
    rope = rope_settings(config, {"rope_theta": config.number("rope_theta", _THETA), **table})
    shape, bias = decoder_shape(config, max_seq_len, rope), config.flag("attention_bias", True)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer % 2 == 0)
    window, sizes = config.optional_integer("sliding_window"), mixture(config, shape)
    apart = config.flag(STORED_APART, False)
    layers = []
    for layer, sliding in zip(hub_layers(config, shape), slides, strict=True):
        spec = AttentionSpec(scale=shape.head_dim**-0.5, window=window if sliding else None)
        attention = layer.attention(spec, qkv_bias=bias, output_bias=bias)
        sinks = Sinks(layer.named(f"{_SINKS}.weight" if apart else _SINKS), shape.num_heads)
        experts = _experts_apart(layer, sizes) if apart else _experts(layer, sizes)
        layers.append(layer.pre_norm(replace(attention, sinks=sinks), experts))
    return decoder(config, shape, layers, ropes=[rope])


def _experts(layer: HubLayer, sizes: Mixture) -> Experts:
    plain = layer.experts(sizes, "clamped_silu", normalized=True, names=_STACKED)
    up, down = (replace(each, weight="", bias="_bias", transposed=True) for each in (plain.up, plain.down))
    by_turns = tuple(part._replace(order=ByTurns()) for part in up.parts)
    return replace(plain, router=replace(plain.router, bias=True), up=replace(up, parts=by_turns), down=down)


def _experts_apart(layer: HubLayer, sizes: Mixture) -> Experts:
    plain = layer.experts(sizes, "clamped_silu", normalized=True, names=_APART)
    up, down = (replace(each, bias=".bias") for each in (plain.up, plain.down))
    return replace(plain, router=replace(plain.router, bias=True), up=up, down=down)


def _check_activation(config: ConfigReader) -> None:
    for key, known in (("swiglu_alpha", SLOPE), ("swiglu_limit", CLAMP)):
        given = config.get(key)
        if given is not None and given != known:
            raise UnsupportedModel(f"{config.source}: {key!r} is {shown(given)}; Ostro runs gpt-oss with {known} only.")


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    decoder = gguf.decoder_config(facts)
    scaling = decoder["rope_scaling"]
    return (
        decoder
        | gguf.expert_config(facts)
        | {
            "intermediate_size": facts.integer("expert_feed_forward_length"),
            # Its turns are not rounded to whole dimensions, which GGUF does not say.
            "rope_scaling": {**scaling, "truncate": False} if isinstance(scaling, dict) else {"rope_type": "default"},
            "sliding_window": facts.integer("attention.sliding_window"),
            "layer_types": gguf.layer_types(facts, period=2),
            STORED_APART: True,
        }
    )


_GGUF_BLOCKS = {
    **gguf.ATTENTION,
    **_APART.by_gguf_name,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": _SINKS,
}

FAMILY = Family(
    "gpt-oss",
    "gpt_oss",
    "GptOssForCausalLM",
    "GptOssModel",
    describe,
    gguf=gguf.GgufNames("gpt-oss", _GGUF_BLOCKS, _gguf_config),
)

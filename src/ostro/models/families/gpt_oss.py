"""gpt-oss: a mixture of experts in every layer, biases everywhere, attention sinks, and sliding windows on every other
layer. Gates and ups are clamped.
"""

from dataclasses import replace
from reprlib import repr as shown

from ostro.errors import UnsupportedModel
from ostro.models.architecture import CLAMP, SLOPE, Architecture, AttentionSpec, Experts, Sinks
from ostro.models.config import ConfigReader
from ostro.models.families.common import (
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
_NAMES = ExpertNames(router="mlp.router", up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    _check_activation(config)
    table = config.table("rope_parameters") or config.table("rope_scaling") or _ROPE
    rope = rope_settings(config, {"rope_theta": config.number("rope_theta", _THETA), **table})
    shape, bias = decoder_shape(config, max_seq_len, rope), config.flag("attention_bias", True)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer % 2 == 0)
    window, sizes = config.optional_integer("sliding_window"), mixture(config, shape)
    layers = []
    for layer, sliding in zip(hub_layers(config, shape), slides, strict=True):
        spec = AttentionSpec(scale=shape.head_dim**-0.5, window=window if sliding else None)
        attention = layer.attention(spec, qkv_bias=bias, output_bias=bias)
        sinks = Sinks(layer.named("self_attn.sinks"), shape.num_heads)
        layers.append(layer.pre_norm(replace(attention, sinks=sinks), _experts(layer, sizes)))
    return decoder(config, shape, layers, ropes=[rope])


def _experts(layer: HubLayer, sizes: Mixture) -> Experts:
    plain = layer.experts(sizes, "clamped_silu", normalized=True, names=_NAMES)
    up, down = (replace(each, weight="", bias="_bias", transposed=True) for each in (plain.up, plain.down))
    by_turns = tuple(part._replace(order=ByTurns()) for part in up.parts)
    return replace(plain, router=replace(plain.router, bias=True), up=replace(up, parts=by_turns), down=down)


def _check_activation(config: ConfigReader) -> None:
    for key, known in (("swiglu_alpha", SLOPE), ("swiglu_limit", CLAMP)):
        given = config.get(key)
        if given is not None and given != known:
            raise UnsupportedModel(f"{config.source}: {key!r} is {shown(given)}; Ostro runs gpt-oss with {known} only.")


FAMILY = Family("gpt-oss", "gpt_oss", "GptOssForCausalLM", "GptOssModel", describe)

"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and sliding windows on some layers."""

from ostro.models.architecture import Architecture, AttentionSpec, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers, sliding_layers
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    act = activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(layer.attention(spec, qkv_bias=True), layer.gated_mlp(act))
        for layer, spec in zip(hub_layers(config, shape), attention_specs(config, shape), strict=True)
    ]
    return decoder(config, shape, layers)


def attention_specs(config: ConfigReader, shape: ModelShape) -> list[AttentionSpec]:
    """One per layer."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    full_layers = config.integer("max_window_layers", shape.num_layers)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer >= full_layers)
    return [AttentionSpec(scale=shape.head_dim**-0.5, window=window if each else None) for each in slides]


def gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return gguf.decoder_config(facts) | {"use_sliding_window": False, "sliding_window": None}


FAMILY = Family(
    "Qwen 2, 2.5",
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2Model",
    describe,
    wrappers=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    gguf=gguf.GgufNames("qwen2", gguf.ATTENTION | gguf.MLP | gguf.PRE_NORMS, gguf_config),
    levanter=(levanter.LevanterNames(type="qwen", defaults=levanter.LLAMA),),
)

"""Granite 3: Llama with multipliers on embeddings, attention scores, residuals and logits."""

from collections.abc import Callable
from dataclasses import replace

from ostro.models.architecture import MLP, Architecture, AttentionSpec, Experts
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import llama
from ostro.models.families.common import HubLayer, activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family

_MULTIPLIER = (1e-6, 1e6)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    act, bias = activation(config, "hidden_act", "silu"), config.flag("mlp_bias", False)
    return scaled(config, max_seq_len, lambda layer: layer.gated_mlp(act, bias=bias))


def scaled(config: ConfigReader, max_seq_len: int | None, mlp: Callable[[HubLayer], MLP | Experts]) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=config.within("attention_multiplier", _MULTIPLIER, 1.0))
    residual_scale = config.within("residual_multiplier", _MULTIPLIER, 1.0)
    bias = config.flag("attention_bias", False)
    layers = [
        replace(
            layer.pre_norm(layer.attention(spec, qkv_bias=bias, output_bias=bias), mlp(layer)),
            residual_scale=residual_scale,
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(
        config,
        shape,
        layers,
        embedding_scale=config.within("embedding_multiplier", _MULTIPLIER, 1.0),
        logit_scale=1.0 / config.within("logits_scaling", _MULTIPLIER, 1.0),
    )


def gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return llama.gguf_config(facts) | {
        # Absent fields mean the usual values here, unlike in a config.json.
        "attention_multiplier": facts.number("attention.scale", max(gguf.head_dim(facts), 1) ** -0.5),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


FAMILY = Family(
    "Granite 3",
    "granite",
    "GraniteForCausalLM",
    "GraniteModel",
    describe,
    gguf=replace(llama.GGUF, architecture="granite", config=gguf_config),
)

"""Granite 3: Llama with multipliers on embeddings, attention scores, residuals and logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ostro.models.architecture import MLP, Architecture, Attention, AttentionSpec, Experts, Mixer, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import llama
from ostro.models.families.common import HubLayer, activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family
from ostro.models.rope_settings import RopeSettings

_MULTIPLIER = (1e-6, 1e6)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    act, bias = activation(config, "hidden_act", "silu"), config.flag("mlp_bias", False)
    shape = decoder_shape(config, max_seq_len)
    return scaled(config, shape, attends(config), lambda layer: layer.gated_mlp(act, bias=bias))


def attends(config: ConfigReader, *, rope: int | None = 0) -> Callable[[HubLayer], Attention]:
    """Builds a layer's attention."""
    spec = AttentionSpec(scale=config.within("attention_multiplier", _MULTIPLIER, 1.0))
    bias = config.flag("attention_bias", False)
    return lambda layer: layer.attention(spec, rope=rope, qkv_bias=bias, output_bias=bias)


def scaled(
    config: ConfigReader,
    shape: ModelShape,
    mixer: Callable[[HubLayer], Mixer],
    mlp: Callable[[HubLayer], MLP | Experts],
    *,
    ropes: Sequence[RopeSettings] | None = None,
) -> Architecture:
    residual_scale = config.within("residual_multiplier", _MULTIPLIER, 1.0)
    layers = [
        replace(layer.pre_norm(mixer(layer), mlp(layer)), residual_scale=residual_scale)
        for layer in hub_layers(config, shape)
    ]
    return decoder(
        config,
        shape,
        layers,
        ropes=ropes,
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

"""Mixtral: Mistral with a mixture of experts in every layer."""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families.common import (
    ExpertNames,
    activation,
    decoder,
    decoder_shape,
    hub_layers,
    mixture,
)
from ostro.models.family import Family

NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=config.optional_integer("sliding_window"))
    sizes, act = mixture(config, shape), activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(layer.attention(spec), layer.experts(sizes, act, normalized=True, names=NAMES))
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


FAMILY = Family("Mixtral", "mixtral", "MixtralForCausalLM", "MixtralModel", describe)

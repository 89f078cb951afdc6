"""Mixtral: Mistral with a mixture of experts in every layer."""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import levanter_names as levanter
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


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    return levanter.llama_config(settings, head_dim) | {
        "num_local_experts": settings.integer("n_routed_experts"),
        "num_experts_per_tok": settings.integer("num_experts_per_tok"),
    }


_LEVANTER_DEFAULTS = {
    **levanter.LLAMA,
    "max_seq_len": 8192,
    "intermediate_dim": 14336,
    "num_kv_heads": 8,
    "layer_norm_epsilon": 1e-6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


FAMILY = Family(
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    "MixtralModel",
    describe,
    levanter=(
        levanter.LevanterNames(
            type="mixtral",
            defaults=_LEVANTER_DEFAULTS,
            # The last two are loss coefficients.
            own_settings=frozenset({"n_routed_experts", "num_experts_per_tok", "lbl_coef", "rzl_coef"}),
            config=_levanter_config,
        ),
    ),
)

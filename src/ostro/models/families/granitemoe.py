"""Granite 3 MoE: Granite 3 with a mixture of experts in every layer."""

from collections.abc import Callable
from dataclasses import replace

from ostro.models.architecture import Architecture, Experts, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import granite, llama
from ostro.models.families.common import STORED_APART, ExpertNames, HubLayer, activation, decoder_shape, mixture
from ostro.models.family import Family

_STACKED = ExpertNames(
    router="block_sparse_moe.router.layer",
    up=("block_sparse_moe.input_linear",),
    down="block_sparse_moe.output_linear",
)
# GGUF stores gates and ups separately, unlike the Hub's checkpoints.
_APART = ExpertNames(
    router=_STACKED.router,
    up=("block_sparse_moe.experts.{}.gate_proj", "block_sparse_moe.experts.{}.up_proj"),
    down="block_sparse_moe.experts.{}.down_proj",
)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    return granite.scaled(config, shape, granite.attends(config), experts(config, shape))


def experts(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], Experts]:
    """Builds a layer's mixture of experts."""
    sizes, act = mixture(config, shape), activation(config, "hidden_act", "silu")
    names = _APART if config.flag(STORED_APART, False) else _STACKED
    return lambda layer: layer.experts(sizes, act, normalized=True, names=names)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return granite.gguf_config(facts) | gguf.expert_config(facts) | {STORED_APART: True}


GGUF = replace(
    llama.GGUF,
    architecture="granitemoe",
    blocks=gguf.ATTENTION | _APART.by_gguf_name | gguf.PRE_NORMS,
    config=_gguf_config,
)
FAMILY = Family(
    "Granite 3 MoE",
    "granitemoe",
    "GraniteMoeForCausalLM",
    "GraniteMoeModel",
    describe,
    gguf=GGUF,
)

"""Qwen 3.5 MoE and 3.6 MoE: Qwen 3.5 with a mixture of experts in each layer, beside an MLP for all tokens."""

from dataclasses import replace

from ostro.models.architecture import Architecture, Experts, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import qwen3_next
from ostro.models.families.common import EXPERT_NAMES, STACKED, STACKED_NAMES, HubLayer, activation, mixture
from ostro.models.families.qwen2_moe import beside_shared
from ostro.models.families.qwen3_5 import GGUF_BLOCKS, TILED, delta_of
from ostro.models.families.qwen3_next import MIXTURE_DEFAULTS, Build, hybrid
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = config.with_defaults(MIXTURE_DEFAULTS)
    return hybrid(
        config, max_seq_len, delta_of(config), lambda shape: beside_shared(config, shape, _experts(config, shape))
    )


def _experts(config: ConfigReader, shape: ModelShape) -> Build:
    act, stacked = activation(config, "hidden_act", "silu"), config.flag(STACKED, False)
    sizes = mixture(config, shape, inner_size="moe_intermediate_size")

    def build(layer: HubLayer) -> Experts:
        found = layer.experts(sizes, act, normalized=True, names=STACKED_NAMES if stacked else EXPERT_NAMES)
        if not stacked:
            return found
        return replace(found, up=replace(found.up, weight=""), down=replace(found.down, weight=""))

    return build


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return qwen3_next.gguf_mixture_config(facts) | {TILED: True}


FAMILY = Family(
    "Qwen 3.5 MoE, 3.6 MoE",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeTextModel",
    describe,
    wrappers=("Qwen3_5MoeForConditionalGeneration",),
    gguf=replace(
        qwen3_next.GGUF,
        architecture="qwen35moe",
        blocks={**GGUF_BLOCKS, **qwen3_next.GGUF_MIXTURE},
        config=_gguf_config,
    ),
)

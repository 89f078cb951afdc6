"""LFM2 MoE: LFM2 with a mixture of experts in all but the first layers."""

from collections.abc import Mapping
from dataclasses import replace

from ostro.models.architecture import MLP, Architecture, Experts, ModelShape, SigmoidRouting
from ostro.models.config import FACTOR, MOST_INNER, MOST_LAYERS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import lfm2
from ostro.models.families.common import ExpertNames, HubLayer, mixture
from ostro.models.family import Family

_DEFAULTS: Mapping[str, object] = {
    **lfm2.DEFAULTS,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
}
_NAMES = ExpertNames(
    router="feed_forward.gate",
    up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = config.with_defaults(_DEFAULTS)
    inner = config.integer("intermediate_size", most=MOST_INNER)
    return lfm2.hybrid(config, max_seq_len, inner, lambda shape: _mlp(config, shape))


def _mlp(config: ConfigReader, shape: ModelShape) -> lfm2.Build:
    sizes = mixture(config, shape, inner_size="moe_intermediate_size")
    dense = config.count("num_dense_layers", most=MOST_LAYERS)
    normalized, biased = config.flag("norm_topk_prob", True), config.flag("use_expert_bias", True)
    scale = config.within("routed_scaling_factor", FACTOR)

    def build(layer: HubLayer) -> MLP | Experts:
        if layer.index < dense:
            return lfm2.gated_mlp(layer)
        bias = layer.named("feed_forward.expert_bias") if biased else None
        experts = layer.experts(sizes, "silu", normalized=normalized, names=_NAMES)
        return replace(experts, sigmoid=SigmoidRouting(choice_bias=bias, eps=1e-6, scale=scale))

    return build


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return (
        lfm2.gguf_config(facts)
        | gguf.expert_config(facts)
        | {
            "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
            "num_dense_layers": facts.integer("leading_dense_block_count", 0),
            "norm_topk_prob": facts.flag("expert_weights_norm", True),
            "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
            "use_expert_bias": gguf.in_some_block(facts, "exp_probs_b.bias"),
        }
    )


FAMILY = Family(
    "LFM2 MoE",
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    "Lfm2MoeModel",
    describe,
    tied=True,
    gguf=replace(
        lfm2.GGUF,
        architecture="lfm2moe",
        blocks={**lfm2.GGUF.blocks, **_NAMES.by_gguf_name},
        config=_gguf_config,
        whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
)

"""Qwen 3 MoE: Qwen 3 with a mixture of experts in most layers."""

from collections.abc import Callable

from ostro.models.architecture import MLP, Architecture, AttentionSpec, Experts, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import EXPERT_NAMES, HubLayer, activation, decoder, decoder_shape, hub_layers, mixture
from ostro.models.families.qwen2 import gguf_config
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    bias, mlp = config.flag("attention_bias", False), sparse_mlp(config, shape)
    # Unlike Qwen 2 and 3, all layers have the window.
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=window)
    layers = [
        layer.pre_norm(layer.attention(spec, qkv_bias=bias, output_bias=bias, qk_norm=layer.head_norms()), mlp(layer))
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


def sparse_mlp(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], MLP | Experts]:
    """Builds a layer's mixture of experts, or its plain MLP if it has none."""
    act = activation(config, "hidden_act", "silu")
    sizes = mixture(config, shape, inner_size="moe_intermediate_size")
    period, plain = config.integer("decoder_sparse_step", 1), frozenset(config.indices("mlp_only_layers"))
    normalized = config.flag("norm_topk_prob", False)

    def build(layer: HubLayer) -> MLP | Experts:
        if layer.index in plain or (layer.index + 1) % period:
            return layer.gated_mlp(act)
        return layer.experts(sizes, act, normalized=normalized)

    return build


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    own = {"moe_intermediate_size": facts.integer("expert_feed_forward_length"), "norm_topk_prob": True}
    return gguf_config(facts) | gguf.expert_config(facts) | own


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    config = levanter.llama_config(settings, head_dim) | {
        "moe_intermediate_size": settings.integer("moe_intermediate_dim"),
        "num_experts": settings.integer("num_experts"),
        "num_experts_per_tok": settings.integer("num_experts_per_tok"),
        "norm_topk_prob": settings.flag("norm_topk_prob"),
        "decoder_sparse_step": settings.integer("decoder_sparse_step"),
    }
    # This type's own default; a rope that is given without a theta has another.
    return config if {"rope", "rope_theta"} & settings.given.keys() else config | {"rope_theta": 1e6}


_LEVANTER_DEFAULTS = {
    **levanter.LLAMA,
    "max_seq_len": 40960,
    "hidden_dim": 2048,
    "intermediate_dim": 6144,
    "num_layers": 48,
    "num_kv_heads": 4,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-6,
    "moe_intermediate_dim": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_LEVANTER_SETTINGS = frozenset(
    (
        *("moe_intermediate_dim", "num_experts", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step"),
        # All layers have the QK norms; the other setting is a loss coefficient.
        *("use_qk_norm", "router_aux_loss_coef"),
    )
)


FAMILY = Family(
    "Qwen 3 MoE",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeModel",
    describe,
    gguf=gguf.GgufNames(
        "qwen3moe", gguf.ATTENTION | gguf.QK_NORMS | EXPERT_NAMES.by_gguf_name | gguf.PRE_NORMS, _gguf_config
    ),
    levanter=(
        levanter.LevanterNames(
            type="qwen3_moe",
            defaults=_LEVANTER_DEFAULTS,
            own_settings=_LEVANTER_SETTINGS,
            head_dim="set",
            config=_levanter_config,
        ),
    ),
)

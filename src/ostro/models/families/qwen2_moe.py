"""Qwen 1.5 MoE and Qwen 2 MoE: Qwen 2 with a mixture of experts in most layers, beside an MLP for all tokens."""

from collections.abc import Callable
from dataclasses import replace

from ostro.models.architecture import MLP, Architecture, Experts, ModelShape, Part, Projection
from ostro.models.config import MOST_INNER, ConfigReader
from ostro.models.families.common import HubLayer, activation, decoder, decoder_shape, hub_layers
from ostro.models.families.qwen2 import attention_specs
from ostro.models.families.qwen3_moe import sparse_mlp
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    bias, mlp = config.flag("qkv_bias", True), beside_shared(config, shape, sparse_mlp(config, shape))
    layers = [
        layer.pre_norm(layer.attention(spec, qkv_bias=bias), mlp(layer))
        for layer, spec in zip(hub_layers(config, shape), attention_specs(config, shape), strict=True)
    ]
    return decoder(config, shape, layers)


def beside_shared(
    config: ConfigReader, shape: ModelShape, mlp: Callable[[HubLayer], MLP | Experts]
) -> Callable[[HubLayer], MLP | Experts]:
    """Builds the same with an MLP for all tokens beside experts, scaled by a gate of its own."""
    act = activation(config, "hidden_act", "silu")
    width = config.integer("shared_expert_intermediate_size", most=MOST_INNER)

    def build(layer: HubLayer) -> MLP | Experts:
        found, gate = mlp(layer), Part(layer.named("mlp.shared_expert_gate"), 1)
        if not isinstance(found, Experts):
            return found
        shared = replace(layer, inner_size=width).gated_mlp(act, parent="mlp.shared_expert")
        return replace(found, shared=shared, shared_gate=Projection(shape.hidden_size, (gate,)))

    return build


FAMILY = Family("Qwen 1.5 MoE, 2 MoE", "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeModel", describe)

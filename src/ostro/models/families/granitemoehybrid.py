"""Granite 4 hybrid: Granite 3 with Mamba-2 in most layers, usually without rotation, and an MLP for all tokens, which
may be beside a mixture of experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ostro.models.architecture import (
    MLP,
    Architecture,
    Experts,
    HubForm,
    HubPart,
    Mamba2,
    ModelShape,
    Part,
    Projection,
)
from ostro.models.config import MOST_HEADS, MOST_INNER, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import granite, granitemoe, llama, mamba2
from ostro.models.families.common import STORED_APART, HubLayer, activation, decoder_shape, limited_layers, with_states
from ostro.models.families.mamba2 import MambaSizes, check_mamba
from ostro.models.family import Family
from ostro.models.rope_settings import rope_settings
from ostro.models.row_order import Excerpt

_DEFAULTS: Mapping[str, object] = {
    "mamba_d_conv": 4,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names in the first configs."""


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    types = config.texts("layer_types") or config.texts("layers_block_type")
    named = {"layer_types": [_LAYER_TYPES.get(name, name) for name in types]}
    config = ConfigReader({**config.values, **named}, config.source).with_defaults(_DEFAULTS)
    shape = decoder_shape(config, max_seq_len)
    recurrent = limited_layers(config, shape.num_layers, otherwise=lambda layer: True, limited="linear_attention")
    rotates = config.text("position_embedding_type", "nope") == "rope"
    attends, mamba = granite.attends(config, rope=0 if rotates else None), _mamba(config, shape)
    return granite.scaled(
        config,
        with_states(config, shape, recurrent),
        lambda layer: mamba(layer) if recurrent[layer.index] else attends(layer),
        _mlp(config, shape),
        ropes=[rope_settings(config)] if rotates else [],
    )


def _mamba(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], Mamba2]:
    width = config.integer("mamba_expand", most=MOST_HEADS) * shape.hidden_size
    sizes = MambaSizes.read(config, width, "'mamba_expand' times 'hidden_size'")
    check_mamba(config)
    bias, conv_bias = config.flag("mamba_proj_bias", False), config.flag("mamba_conv_bias", True)
    return lambda layer: sizes.mixer(layer, "mamba", bias=bias, output_bias=bias, conv_bias=conv_bias)


def _mlp(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], MLP | Experts]:
    act, width = activation(config, "hidden_act", "silu"), config.integer("shared_intermediate_size", most=MOST_INNER)
    experts = None if config.get("num_local_experts") == 0 else granitemoe.experts(config, shape)
    apart = config.flag(STORED_APART, False)

    def gates_and_ups(layer: HubLayer) -> Projection:
        whole = layer.projection("shared_mlp", shape.hidden_size, {"input_linear": 2 * width})
        if not apart:
            return whole
        halves = layer.projection("shared_mlp", shape.hidden_size, {"gate_proj": width, "up_proj": width})
        name = whole.parts[0].name
        hub = tuple(HubPart(name, 2 * width, Excerpt(first, 2 * width)) for first in (0, width))
        return replace(halves, hub=HubForm(hub))

    def build(layer: HubLayer) -> MLP | Experts:
        shared = MLP(
            up=gates_and_ups(layer),
            down=Projection(width, (Part(layer.named("shared_mlp.output_linear"), shape.hidden_size),)),
            activation=act,
            gated=True,
        )
        return shared if experts is None else replace(experts(layer), shared=shared)

    return build


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    hidden, head_dim = max(facts.integer("embedding_length"), 1), gguf.head_dim(facts)
    if (inner := facts.integer("ssm.inner_size")) % hidden:
        raise facts.damaged(f"its Mamba-2 layers are {inner} wide, which is no multiple of {hidden}")
    experts = facts.integer("expert_count", 0)
    return (
        granite.gguf_config(facts)
        | (gguf.expert_config(facts) if experts else {})
        | {
            "head_dim": head_dim,
            "layer_types": gguf.named_layers(facts, recurrent="linear_attention"),
            "mamba_conv_bias": gguf.in_some_block(facts, "ssm_conv1d.bias"),
            "mamba_d_conv": facts.integer("ssm.conv_kernel"),
            "mamba_d_state": facts.integer("ssm.state_size"),
            "mamba_expand": inner // hidden,
            "mamba_n_groups": facts.integer("ssm.group_count"),
            "mamba_n_heads": facts.integer("ssm.time_step_rank"),
            "mamba_proj_bias": gguf.in_some_block(facts, "ssm_in.bias"),
            "num_local_experts": experts,
            "partial_rotary_factor": facts.integer("rope.dimension_count", head_dim) / max(head_dim, 1),
            "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned", True) else "nope",
            "shared_intermediate_size": facts.integer(
                "expert_shared_feed_forward_length", facts.integer("feed_forward_length")
            ),
            STORED_APART: True,
        }
    )


_GGUF_BLOCKS = {
    **granitemoe.GGUF.blocks,
    # The MLP for all tokens has the second names where there are no experts.
    **dict.fromkeys(("ffn_gate_shexp", "ffn_gate"), "shared_mlp.gate_proj"),
    **dict.fromkeys(("ffn_up_shexp", "ffn_up"), "shared_mlp.up_proj"),
    **dict.fromkeys(("ffn_down_shexp", "ffn_down"), "shared_mlp.output_linear"),
    **mamba2.gguf_blocks("mamba"),
}

FAMILY = Family(
    "Granite 4 hybrid",
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeHybridModel",
    describe,
    gguf=replace(
        llama.GGUF,
        architecture="granitehybrid",
        blocks=_GGUF_BLOCKS,
        config=_gguf_config,
        negated_exp=mamba2.GGUF_NEGATED_EXP,
        whole=mamba2.gguf_whole("mamba"),
        reshape=mamba2.GGUF_RESHAPE,
        recurrent=True,
    ),
)

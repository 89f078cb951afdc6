"""Granite 4 hybrid: Granite 3 with Mamba-2 in most layers, usually without rotation, and an MLP for all tokens, which
may be beside a mixture of experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from reprlib import repr as shown

from ostro.errors import UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Architecture,
    Convolution,
    Experts,
    Mamba2,
    ModelShape,
    Part,
    Projection,
)
from ostro.models.config import MOST_HEAD_DIM, MOST_HEADS, MOST_INNER, MOST_TAPS, ConfigReader
from ostro.models.families import granite, granitemoe
from ostro.models.families.common import HubLayer, activation, decoder_shape, limited_layers, with_states
from ostro.models.family import Family
from ostro.models.rope_settings import rope_settings

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
_NO_LIMITS = ([0, math.inf], (0, math.inf), [0, {"__float__": "Infinity"}])
"""As transformers writes them, today last."""


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
    hidden = shape.hidden_size
    heads = config.integer("mamba_n_heads", most=MOST_HEADS)
    width = config.integer("mamba_expand", most=MOST_HEADS) * hidden
    if width % heads:
        raise config.bad("mamba_n_heads", heads, f"a divisor of 'mamba_expand' times 'hidden_size' ({width})")
    if config.get("mamba_d_head") not in (None, "auto"):
        head_dim = config.integer("mamba_d_head", most=MOST_HEAD_DIM)
        if heads * head_dim != width:
            raise config.bad("mamba_d_head", head_dim, f'{width // heads}, or "auto"')
    groups = config.integer("mamba_n_groups", most=MOST_HEADS)
    if heads % groups:
        raise config.bad("mamba_n_groups", groups, f"a divisor of 'mamba_n_heads' ({heads})")
    if config.text("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{config.source}: 'hidden_act' of a model with Mamba-2 layers must be silu.")
    if (limit := config.get("time_step_limit")) is not None and limit not in _NO_LIMITS:
        raise UnsupportedModel(f"{config.source}: 'time_step_limit' is {shown(limit)}, which Ostro does not support.")
    size, taps = config.integer("mamba_d_state", most=MOST_HEAD_DIM), config.integer("mamba_d_conv", most=MOST_TAPS)
    bias, conv_bias = config.flag("mamba_proj_bias", False), config.flag("mamba_conv_bias", True)
    mixed = width + 2 * groups * size

    def build(layer: HubLayer) -> Mamba2:
        return Mamba2(
            heads=heads,
            head_dim=width // heads,
            state_size=size,
            groups=groups,
            inputs=layer.projection("mamba", hidden, {"in_proj": width + mixed + heads}, bias=bias),
            conv=Convolution(layer.named("mamba.conv1d"), mixed, taps, conv_bias),
            decay=layer.named("mamba.A_log"),
            step_bias=layer.named("mamba.dt_bias"),
            skip=layer.named("mamba.D"),
            norm=layer.norm("mamba.norm", width),
            output=layer.projection("mamba", width, {"out_proj": hidden}, bias=bias),
        )

    return build


def _mlp(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], MLP | Experts]:
    act, width = activation(config, "hidden_act", "silu"), config.integer("shared_intermediate_size", most=MOST_INNER)
    experts = None if config.get("num_local_experts") == 0 else granitemoe.experts(config, shape)

    def build(layer: HubLayer) -> MLP | Experts:
        shared = MLP(
            up=Projection(shape.hidden_size, (Part(layer.named("shared_mlp.input_linear"), 2 * width),)),
            down=Projection(width, (Part(layer.named("shared_mlp.output_linear"), shape.hidden_size),)),
            activation=act,
            gated=True,
        )
        return shared if experts is None else replace(experts(layer), shared=shared)

    return build


FAMILY = Family(
    "Granite 4 hybrid",
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeHybridModel",
    describe,
)

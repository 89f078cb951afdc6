"""Granite 4 hybrid: Granite 3 with Mamba-2 in most layers, usually without rotation, and an MLP for all tokens, which
may be beside a mixture of experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ostro.models.architecture import (
    MLP,
    Architecture,
    Experts,
    Mamba2,
    ModelShape,
    Part,
    Projection,
)
from ostro.models.config import MOST_HEADS, MOST_INNER, ConfigReader
from ostro.models.families import granite, granitemoe
from ostro.models.families.common import HubLayer, activation, decoder_shape, limited_layers, with_states
from ostro.models.families.mamba2 import MambaSizes, check_mamba
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

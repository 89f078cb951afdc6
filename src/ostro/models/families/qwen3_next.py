"""Qwen3-Next: gated delta nets in most layers and gated attention in the others, with a mixture of experts in each. All
norm weights but those of the delta nets are stored as differences from one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ostro.errors import UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Architecture,
    AttentionSpec,
    Convolution,
    Experts,
    GatedDelta,
    HubForm,
    HubPart,
    ModelShape,
    Norm,
    Part,
    Projection,
)
from ostro.models.config import MOST_HEAD_DIM, MOST_HEADS, MOST_TAPS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import (
    EXPERT_NAMES,
    HubLayer,
    activation,
    decoder,
    decoder_shape,
    hub_layers,
    recurrent_layers,
    with_states,
)
from ostro.models.families.qwen2_moe import beside_shared
from ostro.models.families.qwen3_moe import sparse_mlp
from ostro.models.family import Family
from ostro.models.row_order import ByHead, Excerpt

DEFAULTS: Mapping[str, object] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
}
MIXTURE_DEFAULTS: Mapping[str, object] = {
    **DEFAULTS,
    # In layers without experts, of which most configs have none.
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
}


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @classmethod
    def read(cls, config: ConfigReader) -> "DeltaSizes":
        keys = config.integer("linear_num_key_heads", most=MOST_HEADS)
        values = config.integer("linear_num_value_heads", most=MOST_HEADS)
        if values % keys:
            raise config.bad("linear_num_value_heads", values, f"a multiple of 'linear_num_key_heads' ({keys})")
        return cls(
            keys,
            values,
            config.integer("linear_key_head_dim", most=MOST_HEAD_DIM),
            config.integer("linear_value_head_dim", most=MOST_HEAD_DIM),
            config.integer("linear_conv_kernel_dim", most=MOST_TAPS),
        )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        return 2 * self.keys + self.values

    def inputs(self, layer: HubLayer) -> tuple[Part, ...]:
        """The inputs in two tensors, of which the second is z."""
        rows = {"in_proj_qkv": self.mixed, "in_proj_z": self.values}
        return tuple(Part(layer.named(f"linear_attn.{name}"), size) for name, size in rows.items())

    def delta(self, layer: HubLayer, inputs: tuple[Part, ...], gates: tuple[Part, ...]) -> GatedDelta:
        """A delta net, given the tensors of its inputs and gates, which differ between families."""

        def named(name: str) -> str:
            return layer.named(f"linear_attn.{name}")

        hidden = layer.shape.hidden_size
        return GatedDelta(
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            inputs=Projection(hidden, inputs),
            gates=Projection(hidden, gates),
            conv=Convolution(named("conv1d"), self.mixed, self.taps),
            decay=named("A_log"),
            decay_bias=named("dt_bias"),
            # Unlike the others, this norm's weights are stored as they are.
            norm=Norm(named("norm"), self.value_dim, layer.eps),
            output=layer.projection("linear_attn", self.values, {"out_proj": hidden}),
        )


_INPUTS_APART = "linear_inputs_stored_apart"
"""A flag in a config that describes a GGUF file, which stores a delta net's z apart from the other inputs, and none of
them by head.
"""

Delta = Callable[[DeltaSizes, HubLayer], GatedDelta]
Build = Callable[[HubLayer], MLP | Experts]


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = config.with_defaults(MIXTURE_DEFAULTS)
    return hybrid(
        config,
        max_seq_len,
        _delta_with_inputs_apart if config.flag(_INPUTS_APART, False) else _delta,
        lambda shape: beside_shared(config, shape, sparse_mlp(config, shape)),
    )


def hybrid(
    config: ConfigReader, max_seq_len: int | None, delta: Delta, mlp_of: Callable[[ModelShape], Build]
) -> Architecture:
    """Delta nets and gated attention, for a config with `DEFAULTS`."""
    shape = decoder_shape(config, max_seq_len)
    recurrent, sizes = recurrent_layers(config, shape), DeltaSizes.read(config)
    # Also of the convolutions; gates of delta nets have no other.
    if any(recurrent) and activation(config, "hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{config.source}: 'hidden_act' of a model with gated delta nets must be silu.")
    shape = with_states(config, shape, recurrent)
    spec, bias = AttentionSpec(scale=shape.head_dim**-0.5), config.flag("attention_bias", False)
    gated, mlp = config.flag("attn_output_gate", True), mlp_of(shape)
    layers = []
    for layer in hub_layers(config, shape, norm_offset=1.0):
        if recurrent[layer.index]:
            layers.append(layer.pre_norm(delta(sizes, layer), mlp(layer)))
            continue
        norms = layer.head_norms()
        attention = layer.attention(spec, qkv_bias=bias, output_bias=bias, qk_norm=norms, gated=gated)
        layers.append(layer.pre_norm(attention, mlp(layer)))
    return decoder(config, shape, layers, norm_offset=1.0)


def _delta(sizes: DeltaSizes, layer: HubLayer) -> GatedDelta:
    return sizes.delta(layer, (_inputs(sizes, layer),), _gates(sizes, layer))


def _delta_with_inputs_apart(sizes: DeltaSizes, layer: HubLayer) -> GatedDelta:
    found, whole = sizes.delta(layer, sizes.inputs(layer), _gates(sizes, layer)), _inputs(sizes, layer)
    excerpts = (Excerpt(first, whole.rows, whole.order) for first in (0, sizes.mixed))
    hub = HubForm(tuple(HubPart(whole.name, whole.rows, each) for each in excerpts))
    return replace(found, inputs=replace(found.inputs, hub=hub))


def _inputs(sizes: DeltaSizes, layer: HubLayer) -> Part:
    """Each key head's rows are stored together with those of its value heads."""
    values = sizes.values // sizes.key_heads
    order = ByHead(sizes.key_heads, (sizes.key_dim, sizes.key_dim, values, values))
    return Part(layer.named("linear_attn.in_proj_qkvz"), sizes.mixed + sizes.values, order)


def _gates(sizes: DeltaSizes, layer: HubLayer) -> tuple[Part, ...]:
    group = sizes.value_heads // sizes.key_heads
    order = ByHead(sizes.key_heads, (group, group))
    return (Part(layer.named("linear_attn.in_proj_ba"), 2 * sizes.value_heads, order),)


def gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    layers, head_dim = gguf.num_layers(facts), gguf.head_dim(facts)
    recurrent = facts.flags("attention.recurrent_layers")
    if recurrent is None:
        interval = max(facts.integer("full_attention_interval", 4), 1)
        recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    values = facts.integer("ssm.time_step_rank")
    return gguf.decoder_config(facts) | {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]],
        "partial_rotary_factor": facts.integer("rope.dimension_count", head_dim) / max(head_dim, 1),
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_num_key_heads": facts.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": facts.integer("ssm.inner_size") // max(values, 1),
    }


def gguf_mixture_config(facts: gguf.GgufFacts) -> gguf.Config:
    return (
        gguf_config(facts)
        | gguf.expert_config(facts)
        | {
            "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
            "shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        }
    )


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    # The first files held these inputs as the Hub does.
    return gguf_mixture_config(facts) | {_INPUTS_APART: not gguf.in_some_block(facts, "ssm_in.weight")}


GGUF_MIXTURE = EXPERT_NAMES.by_gguf_name | {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
GGUF_BLOCKS = {
    **gguf.ATTENTION,
    **gguf.QK_NORMS,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Names in files of all families with these layers."""
GGUF = gguf.GgufNames(
    "qwen3next",
    {
        **GGUF_BLOCKS,
        **GGUF_MIXTURE,
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    _gguf_config,
    subtract_one=gguf.NORMS,
    negated_exp=frozenset({"ssm_a"}),
    whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    reshape={"ssm_a": gguf.flat, "ssm_conv1d": gguf.filters, "ffn_gate_inp_shexp": gguf.single_row},
    recurrent=True,
)
FAMILY = Family("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextModel", describe, gguf=GGUF)

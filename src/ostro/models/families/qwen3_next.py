"""Qwen3-Next: gated delta nets in most layers and gated attention in the others, with a mixture of experts in each. All
norm weights but those of the delta nets are stored as differences from one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ostro.errors import UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Architecture,
    AttentionSpec,
    Convolution,
    Experts,
    GatedDelta,
    ModelShape,
    Norm,
    Part,
    Projection,
)
from ostro.models.config import MOST_HEAD_DIM, MOST_HEADS, MOST_TAPS, ConfigReader
from ostro.models.families.common import (
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
from ostro.models.row_order import ByHead

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


Delta = Callable[[DeltaSizes, HubLayer], GatedDelta]
Build = Callable[[HubLayer], MLP | Experts]


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    config = config.with_defaults(MIXTURE_DEFAULTS)
    return hybrid(
        config,
        max_seq_len,
        _delta,
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
    """Each key head's rows are stored together with those of its value heads."""
    group = sizes.value_heads // sizes.key_heads
    values, heads = group * sizes.value_dim, sizes.key_heads
    qkvz = ByHead(heads, (sizes.key_dim, sizes.key_dim, values, values))
    return sizes.delta(
        layer,
        (Part(layer.named("linear_attn.in_proj_qkvz"), sizes.mixed + sizes.values, qkvz),),
        (Part(layer.named("linear_attn.in_proj_ba"), 2 * sizes.value_heads, ByHead(heads, (group, group))),),
    )


FAMILY = Family("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextModel", describe)

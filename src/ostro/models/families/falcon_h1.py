"""Falcon-H1: attention and Mamba-2 side by side in every layer, and many multipliers. All are linear, so they scale
attention's scores, the embedding and the head, or weights on loading.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ostro.errors import UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Architecture,
    Attention,
    AttentionSpec,
    Layer,
    Mamba2,
    MixerPair,
    ModelShape,
    Projection,
    RowScale,
)
from ostro.models.config import MOST_HEADS, MOST_INNER, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import mamba2
from ostro.models.families.common import HubLayer, decoder, decoder_shape, hub_layers
from ostro.models.families.mamba2 import MambaSizes, check_mamba
from ostro.models.family import Family

_DEFAULTS: Mapping[str, object] = {
    "mamba_d_conv": 4,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "rms_norm_eps": 1e-5,
}
_MULTIPLIER = (1e-6, 1e6)
_FOLDED = "multipliers_folded"
"""Set for GGUF files, which hold products of weights and multipliers."""


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    # A null says that the width follows from the model's.
    width = {"mamba_d_ssm": config.values.get("mamba_d_ssm", 1024)}
    config = ConfigReader({**config.with_defaults(_DEFAULTS).values, **width}, config.source)
    check_mamba(config)
    shape = decoder_shape(config, max_seq_len)
    attention, mamba, mlp = _attention(config, shape), _mamba(config, shape), _mlp(config)
    layers = [
        Layer(
            mixer=MixerPair(attention=attention(layer), recurrent=mamba(layer)),
            mlp=mlp(layer),
            attention_norm=layer.norm("input_layernorm"),
            mlp_norm=layer.norm("pre_ff_layernorm"),
        )
        for layer in hub_layers(config, shape)
    ]
    described = decoder(
        config,
        shape,
        layers,
        embedding_scale=_multiplier(config, "embedding_multiplier"),
        logit_scale=_multiplier(config, "lm_head_multiplier"),
    )
    norm = replace(described.norm, name="model.final_layernorm")
    return replace(described, norm=norm, folded=config.flag(_FOLDED, False))


def _multiplier(config: ConfigReader, key: str) -> float:
    return config.within(key, _MULTIPLIER, 1.0)


def _multipliers(config: ConfigReader, key: str, number: int) -> tuple[float, ...]:
    if config.get(key) is None:
        return (1.0,) * number
    found = config.numbers(key)
    least, most = _MULTIPLIER
    if len(found) != number or not all(least <= each <= most for each in found):
        raise config.bad(key, list(found), f"a list of {number} numbers from {least} to {most}")
    return found


def _scaled(projection: Projection, *scales: Sequence[RowScale]) -> Projection:
    """The projection with factors for the rows of each of its parts, unless all of them are ones."""
    if all(each.factor == 1.0 for own in scales for each in own):
        return projection
    parts = (part._replace(scales=tuple(own)) for part, own in zip(projection.parts, scales, strict=True))
    return replace(projection, parts=tuple(parts))


def _attention(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], Attention]:
    # Keys are scaled, that is their scores.
    spec = AttentionSpec(scale=shape.head_dim**-0.5 * _multiplier(config, "key_multiplier"))
    bias = config.flag("attention_bias", False)
    read, added = _multiplier(config, "attention_in_multiplier"), _multiplier(config, "attention_out_multiplier")

    def build(layer: HubLayer) -> Attention:
        plain = layer.attention(spec, qkv_bias=bias, output_bias=bias)
        output = _scaled(plain.output, [RowScale(shape.hidden_size, added)])
        return replace(plain, qkv=replace(plain.qkv, input_scale=read), output=output)

    return build


def _mamba(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], Mamba2]:
    if config.get("mamba_d_ssm") is not None:
        width, width_named = config.integer("mamba_d_ssm", most=MOST_INNER), "'mamba_d_ssm'"
    else:
        width = config.integer("mamba_expand", most=MOST_HEADS) * shape.hidden_size
        width_named = "'mamba_expand' times 'hidden_size'"
    sizes = MambaSizes.read(config, width, width_named)
    bias, output_bias = config.flag("mamba_proj_bias", False), config.flag("projectors_bias", False)
    conv_bias, normed = config.flag("mamba_conv_bias", True), config.flag("mamba_rms_norm", False)
    norm_first = config.flag("mamba_norm_before_gate", True)
    read, added = _multiplier(config, "ssm_in_multiplier"), _multiplier(config, "ssm_out_multiplier")
    factors = _multipliers(config, "ssm_multipliers", len(sizes.input_rows))
    scales = [RowScale(rows, factor) for rows, factor in zip(sizes.input_rows, factors, strict=True)]

    def build(layer: HubLayer) -> Mamba2:
        plain = sizes.mixer(layer, "mamba", bias=bias, output_bias=output_bias, conv_bias=conv_bias)
        return replace(
            plain,
            inputs=replace(_scaled(plain.inputs, scales), input_scale=read),
            norm=plain.norm if normed else None,
            norm_groups=sizes.groups,
            gates_normed=norm_first,
            output=_scaled(plain.output, [RowScale(shape.hidden_size, added)]),
        )

    return build


def _mlp(config: ConfigReader) -> Callable[[HubLayer], MLP]:
    bias, (gate, down) = config.flag("mlp_bias", False), _multipliers(config, "mlp_multipliers", 2)

    def build(layer: HubLayer) -> MLP:
        plain, inner = layer.gated_mlp("silu", bias=bias, parent="feed_forward"), layer.inner_size
        return replace(
            plain,
            up=_scaled(plain.up, [RowScale(inner, gate)], [RowScale(inner, 1.0)]),
            down=_scaled(plain.down, [RowScale(layer.shape.hidden_size, down)]),
        )

    return build


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    """All multipliers are ones, as converters multiply the weights by them."""
    if not facts.has_tensor("output.weight"):
        # The embedding is multiplied by its own factor, and the head's is lost.
        raise UnsupportedModel(
            f"{facts.path} has no output.weight, so that nothing says how much smaller the logits of this Falcon-H1 "
            "are than its embedding makes them. Use the checkpoint in safetensors."
        )
    return gguf.decoder_config(facts) | {
        _FOLDED: True,
        "mamba_conv_bias": gguf.in_some_block(facts, "ssm_conv1d.bias"),
        "mamba_d_conv": facts.integer("ssm.conv_kernel"),
        "mamba_d_ssm": facts.integer("ssm.inner_size"),
        "mamba_d_state": facts.integer("ssm.state_size"),
        "mamba_n_groups": facts.integer("ssm.group_count"),
        "mamba_n_heads": facts.integer("ssm.time_step_rank"),
        # Files do not say; llama.cpp takes this as given, and so are the published models.
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": gguf.in_some_block(facts, "ssm_norm.weight"),
    }


_GGUF_BLOCKS = {
    **gguf.ATTENTION,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **{theirs: ours.replace("mlp", "feed_forward") for theirs, ours in gguf.MLP.items()},
    **mamba2.gguf_blocks("mamba"),
}

FAMILY = Family(
    "Falcon-H1",
    "falcon_h1",
    "FalconH1ForCausalLM",
    "FalconH1Model",
    describe,
    gguf=gguf.GgufNames(
        "falcon-h1",
        _GGUF_BLOCKS,
        _gguf_config,
        roots={**gguf.ROOTS, "output_norm": "model.final_layernorm"},
        negated_exp=mamba2.GGUF_NEGATED_EXP,
        # Usually, this norm's name has no ending.
        whole={**mamba2.gguf_whole("mamba"), "ffn_norm": "pre_ff_layernorm.weight"},
        reshape=mamba2.GGUF_RESHAPE,
        recurrent=True,
    ),
)

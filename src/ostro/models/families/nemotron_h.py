"""Nemotron-H and Nemotron 3: each layer is a block of one part, which is Mamba-2, attention without rotation, an MLP
without gates, or a mixture of such MLPs beside a shared one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown

from ostro.errors import UnsupportedModel
from ostro.models.architecture import (
    MLP,
    Activation,
    Architecture,
    Attention,
    AttentionSpec,
    Embedding,
    ExpertMatrices,
    Experts,
    Head,
    Layer,
    Mamba2,
    ModelShape,
    Norm,
    Part,
    Projection,
    SigmoidRouting,
)
from ostro.models.config import EPS, FACTOR, MOST_HEAD_DIM, MOST_HEADS, MOST_INNER, MOST_LAYERS, MOST_TAPS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import llama, mamba2
from ostro.models.families.common import HubLayer, activation, decoder_shape, mixture, with_states
from ostro.models.families.mamba2 import MambaSizes, check_mamba
from ostro.models.family import Family

_BACKBONE = "backbone"
_DEFAULTS: Mapping[str, object] = {
    "conv_kernel": 4,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_groups": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "ssm_state_size": 128,
}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_BLOCKS = {"mamba": "linear_attention", "attention": "full_attention", **{name: name for name in _PATTERN.values()}}
"""Kinds of blocks by their names, of which the first two are those in older files."""
_NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "moe_latent_size": (None,),
    "n_group": (None, 1),
    "n_shared_experts": (None, 1),
    "sliding_window": (None,),
    # Transformers does not tie the head whatever this says.
    "tie_word_embeddings": (None, False),
    "topk_group": (None, 1),
}
"""Variants that Ostro does not compute: keys, and the values that they may have."""


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    blocks = _blocks(config)
    config = ConfigReader({**config.with_defaults(_DEFAULTS).values, "num_hidden_layers": len(blocks)}, config.source)
    check_mamba(config, activation_key="mamba_hidden_act")
    for key, allowed in _NOT_BUILT.items():
        if config.get(key) not in allowed:
            raise UnsupportedModel(
                f"{config.source}: {key!r} is {shown(config.get(key))}, which Ostro does not support."
            )
    shape = decoder_shape(config, max_seq_len)
    attention, mamba, mlp, experts = _attention(config, shape), _mamba(config), _mlp(config), _experts(config, shape)
    shape = with_states(config, shape, [block != "full_attention" for block in blocks])
    eps, inner = config.within("layer_norm_epsilon", EPS), config.integer("intermediate_size", most=MOST_INNER)
    layers = []
    for index, block in enumerate(blocks):
        layer = HubLayer(index, shape, eps, inner, backbone=_BACKBONE)
        if block in ("linear_attention", "full_attention"):
            mixer = mamba(layer) if block == "linear_attention" else attention(layer)
            layers.append(Layer(mixer=mixer, mlp=None, attention_norm=layer.norm("norm")))
        else:
            part = mlp(layer) if block == "mlp" else experts(layer)
            layers.append(Layer(mixer=None, mlp=part, mlp_norm=layer.norm("norm")))
    return Architecture(
        shape=shape,
        embedding=Embedding(name=f"{_BACKBONE}.embeddings"),
        layers=tuple(layers),
        norm=Norm(f"{_BACKBONE}.norm_f", shape.hidden_size, eps),
        head=Head(name="lm_head"),
    )


def _blocks(config: ConfigReader) -> Sequence[str]:
    """The kind of each block."""
    named, key = config.texts("layer_types"), "layer_types"
    if not named:
        named, key = config.texts("layers_block_type"), "layers_block_type"
    if not named:
        key = "hybrid_override_pattern"
        named = tuple(_PATTERN.get(letter, letter) for letter in config.text(key))
    blocks = tuple(_BLOCKS.get(name, name) for name in named)
    if not blocks or not set(_PATTERN.values()).issuperset(blocks):
        raise UnsupportedModel(
            f"{config.source}: {key!r} must say of each layer whether it is {', '.join(_PATTERN.values())}, got "
            f"{shown(config.get(key))}."
        )
    layers = config.integer("num_hidden_layers", len(blocks), most=MOST_LAYERS)
    if layers != len(blocks):
        raise config.bad("num_hidden_layers", layers, f"{len(blocks)}, as many as {key!r} has")
    return blocks


def _attention(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], Attention]:
    spec, bias = AttentionSpec(scale=shape.head_dim**-0.5), config.flag("attention_bias", False)
    return lambda layer: layer.attention(spec, parent="mixer", rope=None, qkv_bias=bias, output_bias=bias)


def _mamba(config: ConfigReader) -> Callable[[HubLayer], Mamba2]:
    heads, groups = (config.integer(key, most=MOST_HEADS) for key in ("mamba_num_heads", "n_groups"))
    if heads % groups:
        raise config.bad("n_groups", groups, f"a divisor of 'mamba_num_heads' ({heads})")
    sizes = MambaSizes(
        heads=heads,
        head_dim=config.integer("mamba_head_dim", most=MOST_HEAD_DIM),
        state_size=config.integer("ssm_state_size", most=MOST_HEAD_DIM),
        groups=groups,
        taps=config.integer("conv_kernel", most=MOST_TAPS),
    )
    bias, conv_bias = config.flag("use_bias", False), config.flag("use_conv_bias", True)

    def build(layer: HubLayer) -> Mamba2:
        plain = sizes.mixer(layer, "mixer", bias=bias, output_bias=bias, conv_bias=conv_bias)
        return replace(plain, norm_groups=groups)

    return build


def _mlp(config: ConfigReader) -> Callable[[HubLayer], MLP]:
    act, bias = activation(config, "mlp_hidden_act", "relu2"), config.flag("mlp_bias", False)
    return lambda layer: _plain_mlp(layer, "mixer", layer.inner_size, act, bias=bias)


def _plain_mlp(layer: HubLayer, parent: str, inner: int, act: Activation, *, bias: bool) -> MLP:
    hidden = layer.shape.hidden_size
    return MLP(
        up=layer.projection(parent, hidden, {"up_proj": inner}, bias=bias),
        down=layer.projection(parent, inner, {"down_proj": hidden}, bias=bias),
        activation=act,
        gated=False,
    )


def _experts(config: ConfigReader, shape: ModelShape) -> Callable[[HubLayer], Experts]:
    act, bias = activation(config, "mlp_hidden_act", "relu2"), config.flag("mlp_bias", False)
    sizes = mixture(config, shape, inner_size="moe_intermediate_size", count_key="n_routed_experts")
    shared = config.integer("moe_shared_expert_intermediate_size", most=MOST_INNER)
    normalized, scale = config.flag("norm_topk_prob", True), config.within("routed_scaling_factor", FACTOR)

    def build(layer: HubLayer) -> Experts:
        hidden, inner = shape.hidden_size, sizes.inner_size
        up, down = (layer.named(f"mixer.experts.{{}}.{part}_proj") for part in ("up", "down"))
        bias_name = layer.named("mixer.gate.e_score_correction_bias")
        return Experts(
            router=Projection(hidden, (Part(layer.named("mixer.gate"), sizes.experts),)),
            up=ExpertMatrices(sizes.experts, hidden, (Part(up, inner),)),
            down=ExpertMatrices(sizes.experts, inner, (Part(down, hidden),)),
            activation=act,
            gated=False,
            chosen=sizes.chosen,
            normalized=normalized,
            sigmoid=SigmoidRouting(choice_bias=bias_name, eps=1e-20, scale=scale, exact=True),
            shared=_plain_mlp(layer, "mixer.shared_experts", shared, act, bias=bias),
        )

    return build


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    heads, inner = facts.integer("ssm.time_step_rank"), facts.integer("ssm.inner_size")
    if heads == 0 or inner % heads:
        raise facts.damaged(f"its Mamba-2 layers are {inner} wide, which {heads} heads cannot share")
    return (
        gguf.attention_config(facts)
        | (_gguf_experts(facts) if gguf.in_some_block(facts, "ffn_gate_inp.weight") else {})
        | {
            "attention_bias": gguf.in_some_block(facts, "attn_q.bias"),
            "conv_kernel": facts.integer("ssm.conv_kernel"),
            "intermediate_size": gguf.inner_size(facts),
            "layer_norm_epsilon": facts.number("attention.layer_norm_rms_epsilon"),
            "layer_types": [_gguf_block(facts, layer) for layer in range(gguf.num_layers(facts))],
            "mamba_head_dim": inner // heads,
            "mamba_num_heads": heads,
            "mlp_bias": gguf.in_some_block(facts, "ffn_up.bias"),
            "n_groups": facts.integer("ssm.group_count"),
            "ssm_state_size": facts.integer("ssm.state_size"),
            "use_bias": gguf.in_some_block(facts, "ssm_in.bias"),
            "use_conv_bias": gguf.in_some_block(facts, "ssm_conv1d.bias"),
        }
    )


def _gguf_block(facts: gguf.GgufFacts, layer: int) -> str:
    """The kind of a block, which files name only by the tensors that it has."""
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    for name, kind in kinds.items():
        if facts.has_tensor(f"blk.{layer}.{name}.weight"):
            return kind
    raise facts.damaged(f"block {layer} has none of the tensors {', '.join(kinds)}")


def _gguf_experts(facts: gguf.GgufFacts) -> gguf.Config:
    return {
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "moe_latent_size": facts.integer("moe_latent_size", 0) or None,
        "moe_shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        "n_group": facts.integer("expert_group_count", 1),
        "n_routed_experts": facts.integer("expert_count"),
        "n_shared_experts": facts.integer("expert_shared_count", 1),
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "topk_group": facts.integer("expert_group_used_count", 1),
    }


_GGUF_BLOCKS = {
    "attn_norm": "norm",
    **{theirs: ours.replace("self_attn", "mixer") for theirs, ours in gguf.ATTENTION.items()},
    **mamba2.gguf_blocks("mixer"),
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}

FAMILY = Family(
    "Nemotron-H, Nemotron 3",
    "nemotron_h",
    "NemotronHForCausalLM",
    "NemotronHModel",
    describe,
    backbone=_BACKBONE,
    gguf=gguf.GgufNames(
        "nemotron_h",
        _GGUF_BLOCKS,
        _gguf_config,
        aliases=("nemotron_h_moe",),
        block_prefix=f"{_BACKBONE}.layers",
        roots={
            "token_embd": f"{_BACKBONE}.embeddings",
            "output_norm": f"{_BACKBONE}.norm_f",
            "output": "lm_head",
        },
        # As Llama's, though nothing is rotated.
        rotate_halves=llama.GGUF.rotate_halves,
        negated_exp=mamba2.GGUF_NEGATED_EXP,
        whole={**mamba2.gguf_whole("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        reshape=mamba2.GGUF_RESHAPE,
        recurrent=True,
    ),
)

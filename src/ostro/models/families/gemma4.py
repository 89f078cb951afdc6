"""Gemma 4 (text): norms around attention and MLP, and of each head's queries, keys and values. Layers with a sliding
window and those without differ in their heads and ropes, and the latter may use keys as values. The last layers of the
E models read the keys and values of earlier ones, and each layer has an input of its own. Mixtures have experts beside
the MLPs.

Unlike in earlier Gemmas, norm weights are stored as they are, and scores are not scaled.
"""

from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as shown

from ostro.errors import UnsupportedModel
from ostro.models.architecture import (
    Activation,
    Architecture,
    Attention,
    AttentionSpec,
    Heads,
    LayerInput,
    LayerInputs,
    ModelShape,
    Norm,
    Part,
    Projection,
    SideExperts,
)
from ostro.models.config import EPS, MOST_HEAD_DIM, MOST_HEADS, MOST_INNER, MOST_LAYERS, MOST_VOCAB, ConfigReader
from ostro.models.families.common import (
    ExpertNames,
    HubLayer,
    Mixture,
    activation,
    decoder,
    decoder_shape,
    hub_layers,
    mixture,
    sliding_layers,
)
from ostro.models.family import Family
from ostro.models.rope_settings import rope_settings

_GLOBAL_HEAD_DIM = 512
_ROPES: Mapping[str, Mapping[str, object]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_PERIOD = 6
_DEFAULTS: Mapping[str, object] = {
    "head_dim": 256,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
}
_SOFTCAP = (1e-3, 1e6)
_EXPERTS = ExpertNames(router="router.proj", up=("experts.gate_up_proj",), down="experts.down_proj")


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    _check_variant(config)
    config = ConfigReader({**_DEFAULTS, **config.values}, config.source)
    shape = decoder_shape(config, max_seq_len)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: (layer + 1) % _PERIOD != 0)
    # The last layer never has a window, whatever the file says.
    slides = (*slides[:-1], False)
    heads, sources = _layer_heads(config, shape, slides), _kv_layers(config, slides)
    shape = replace(shape, layer_heads=tuple(map(_heads_kept, heads, sources)))
    inputs = _layer_inputs(config, shape)
    window, act = config.integer("sliding_window"), activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias, shares = config.flag("attention_bias", False), config.flag("attention_k_eq_v", False)
    widens = config.flag("use_double_wide_mlp", False)
    sizes = None
    if config.flag("enable_moe_block", False):
        sizes = mixture(config, shape, inner_size="moe_intermediate_size", chosen_key="top_k_experts")
    layers = []
    for layer, sliding, source in zip(hub_layers(config, shape), slides, sources, strict=True):
        spec = AttentionSpec(scale=1.0, window=window if sliding else None)
        if source is not None and heads[source].dim != layer.shape.head_dim:
            wanted = f"such that layer {layer.index} has heads as wide as layer {source}, whose keys it reads"
            raise config.bad("per_layer_config", config.get("per_layer_config"), wanted)
        attention = layer.attention(spec, rope=int(sliding), qkv_bias=bias, output_bias=bias)
        attention = _normed(layer, attention, source, values_are_keys=shares and not sliding)
        wide = replace(layer, inner_size=2 * layer.inner_size) if widens and source is not None else layer
        built = layer.sandwich_norm(attention, wide.gated_mlp(act))
        own = None if inputs is None else _layer_input(layer, inputs.width, act)
        side = None if sizes is None else _side_experts(layer, sizes, act)
        layers.append(replace(built, side=side, input=own, stream_scale=layer.named("layer_scalar")))
    tables = ConfigReader(config.table("rope_parameters") or _ROPES, config.source)
    described = decoder(
        config,
        shape,
        layers,
        ropes=[rope_settings(config, tables.table(name) or _ROPES[name]) for name in _ROPES],
        embedding_scale=shape.hidden_size**0.5,
        logit_softcap=config.optional_number("final_logit_softcapping", _SOFTCAP),
    )
    return replace(described, layer_inputs=inputs)


def _normed(layer: HubLayer, attention: Attention, kv_layer: int | None, *, values_are_keys: bool) -> Attention:
    """The attention with its norms, and without the projections that it shares with keys or another layer."""
    queries, keys, _ = attention.qkv.parts
    if kv_layer is not None:
        qkv, norm = replace(attention.qkv, parts=(queries,)), layer.norm("self_attn.q_norm", layer.shape.head_dim)
        return replace(attention, qkv=qkv, query_norm=norm, kv_layer=kv_layer)
    norm = Norm(layer.named("self_attn.v_norm"), layer.shape.head_dim, layer.eps, weighted=False)
    attention = replace(attention, qk_norm=layer.head_norms(), value_norm=norm)
    if not values_are_keys:
        return attention
    return replace(attention, qkv=replace(attention.qkv, parts=(queries, keys)), values_are_keys=True)


def _heads_kept(heads: Heads, kv_layer: int | None) -> Heads:
    return heads if kv_layer is None else heads._replace(kv=0)


def _kv_layers(config: ConfigReader, slides: tuple[bool, ...]) -> list[int | None]:
    """For each layer, the one whose keys and values it reads: the last one of its kind before the last
    `num_kv_shared_layers` layers.
    """
    shared = config.count("num_kv_shared_layers", 0, most=MOST_LAYERS)
    first = len(slides) - shared
    if shared and not set(slides[: max(first, 0)]).issuperset(slides):
        raise config.bad("num_kv_shared_layers", shared, "so few that some layer of each kind keeps its own keys")
    last = {sliding: index for index, sliding in enumerate(slides[:first])}
    return [last[sliding] if index >= first else None for index, sliding in enumerate(slides)]


def _unread(config: ConfigReader) -> frozenset[str]:
    """Published checkpoints also hold keys and values of layers that read another layer's."""
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    first = layers - config.count("num_kv_shared_layers", 0, most=MOST_LAYERS)
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return frozenset(f"model.layers.{index}.self_attn.{name}" for index in range(first, layers) for name in names)


def _layer_inputs(config: ConfigReader, shape: ModelShape) -> LayerInputs | None:
    width = config.count("hidden_size_per_layer_input", 0, most=MOST_INNER // shape.num_layers)
    if not width:
        return None
    rows = config.integer("vocab_size_per_layer_input", shape.vocab_size, most=MOST_VOCAB)
    if rows < shape.vocab_size:
        raise config.bad("vocab_size_per_layer_input", rows, f"at least 'vocab_size' ({shape.vocab_size})")
    all_layers = shape.num_layers * width
    return LayerInputs(
        table=Part("model.embed_tokens_per_layer", rows),
        width=width,
        projection=Projection(shape.hidden_size, (Part("model.per_layer_model_projection", all_layers),)),
        norm=Norm("model.per_layer_projection_norm", width, config.within("rms_norm_eps", EPS)),
        table_scale=width**0.5,
        projection_scale=shape.hidden_size**-0.5,
        scale=2**-0.5,
    )


def _side_experts(layer: HubLayer, sizes: Mixture, act: Activation) -> SideExperts:
    experts = layer.experts(sizes, act, normalized=True, names=_EXPERTS)
    up, down = (replace(each, weight="") for each in (experts.up, experts.down))
    return SideExperts(
        experts=replace(experts, up=up, down=down, weight_scales=layer.named("router.per_expert_scale")),
        mlp_norm=layer.norm("post_feedforward_layernorm_1"),
        norm=layer.norm("pre_feedforward_layernorm_2"),
        post_norm=layer.norm("post_feedforward_layernorm_2"),
        router_weight=layer.named("router.scale"),
        router_scale=layer.shape.hidden_size**-0.5,
    )


def _layer_input(layer: HubLayer, width: int, act: Activation) -> LayerInput:
    hidden = layer.shape.hidden_size
    return LayerInput(
        gate=Projection(hidden, (Part(layer.named("per_layer_input_gate"), width),)),
        output=Projection(width, (Part(layer.named("per_layer_projection"), hidden),)),
        norm=layer.norm("post_per_layer_input_norm"),
        activation=act,
    )


def _layer_heads(config: ConfigReader, shape: ModelShape, slides: tuple[bool, ...]) -> tuple[Heads, ...]:
    """Layers without a window have sizes of their own; in newer files any layer may, in a table."""
    local, tables = Heads(shape.num_kv_heads, shape.head_dim), _layer_tables(config, len(slides))
    if tables is not None:
        own = [tables.get(index, {}) for index in range(len(slides))]
        return tuple(_own_heads(config, table, index, local, shape.num_heads) for index, table in enumerate(own))
    kv = config.get("num_global_key_value_heads") if config.flag("attention_k_eq_v", False) else None
    kv_heads = local.kv if kv is None else config.integer("num_global_key_value_heads", most=MOST_HEADS)
    _check_kv_heads(config, "num_global_key_value_heads", kv_heads, shape.num_heads)
    whole = Heads(kv_heads, config.integer("global_head_dim", _GLOBAL_HEAD_DIM, most=MOST_HEAD_DIM))
    return tuple(local if sliding else whole for sliding in slides)


def _layer_tables(config: ConfigReader, num_layers: int) -> dict[int, Mapping[str, object]] | None:
    """The tables of `per_layer_config`, by layer; their keys may have leading zeros."""
    tables = config.table("per_layer_config")
    if tables is None:
        return None
    layers = {
        str(index).zfill(width): index for index in range(num_layers) for width in range(len(str(num_layers)) + 1)
    }
    found: dict[int, Mapping[str, object]] = {}
    for key in tables:
        if key not in layers or layers[key] in found:
            wanted = f"keyed by the numbers of layers, 0 to {num_layers - 1}, each once, and not by {shown(key)}"
            raise config.bad("per_layer_config", dict(tables), wanted)
        found[layers[key]] = ConfigReader(tables, config.source).table(key) or {}
    return found


def _own_heads(config: ConfigReader, table: Mapping[str, object], layer: int, usual: Heads, num_heads: int) -> Heads:
    if unknown := table.keys() - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(
            f"{config.source}: 'per_layer_config' gives layer {layer} a {shown(min(unknown))} of its own, which is not "
            "supported; layers may differ in 'head_dim' and 'num_key_value_heads'."
        )
    own = ConfigReader(table, config.source)
    kv_heads = own.integer("num_key_value_heads", usual.kv, most=MOST_HEADS)
    _check_kv_heads(config, "num_key_value_heads", kv_heads, num_heads)
    return Heads(kv_heads, own.integer("head_dim", usual.dim, most=MOST_HEAD_DIM))


def _check_kv_heads(config: ConfigReader, key: str, kv_heads: int, heads: int) -> None:
    if heads % kv_heads:
        raise config.bad(key, kv_heads, f"a divisor of 'num_attention_heads' ({heads})")


def _check_variant(config: ConfigReader) -> None:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("Gemma with bidirectional attention is not supported; only its causal models are.")


FAMILY = Family(
    "Gemma 4 (text)",
    "gemma4_text",
    "Gemma4ForCausalLM",
    "Gemma4TextModel",
    describe,
    wrappers=("Gemma4ForConditionalGeneration",),
    tied=True,
    unread=_unread,
)

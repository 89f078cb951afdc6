"""LFM2: short convolutions in most layers, attention with normed heads in the others."""

from collections.abc import Callable, Mapping

from ostro.models.architecture import (
    MLP,
    Architecture,
    Attention,
    AttentionSpec,
    Convolution,
    Embedding,
    Experts,
    Head,
    Layer,
    ModelShape,
    Norm,
    QKNorm,
    ShortConvolution,
)
from ostro.models.config import EPS, FACTOR, MOST_INNER, MOST_TAPS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import HubLayer, decoder_shape, limited_layers, with_states
from ostro.models.family import Family
from ostro.models.rope_settings import checked_rope, rope_settings

DEFAULTS: Mapping[str, object] = {"conv_L_cache": 3, "norm_eps": 1e-5, "rope_theta": 1e6}
Build = Callable[[HubLayer], MLP | Experts]


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    # Here, a null says that there is none.
    multiplier = {"block_ffn_dim_multiplier": config.values.get("block_ffn_dim_multiplier", 1.0)}
    config = ConfigReader({**config.with_defaults(DEFAULTS).values, **multiplier}, config.source)
    return hybrid(config, max_seq_len, _inner_size(config), lambda shape: gated_mlp)


def hybrid(
    config: ConfigReader, max_seq_len: int | None, inner_size: int, mlp_of: Callable[[ModelShape], Build]
) -> Architecture:
    """Short convolutions and attention, for a config with `DEFAULTS`."""
    shape, rope = decoder_shape(config, max_seq_len), rope_settings(config)
    attends = config.indices("full_attn_idxs") if config.get("full_attn_idxs") is not None else range(shape.num_layers)
    recurrent = limited_layers(config, shape.num_layers, otherwise=lambda layer: layer not in attends, limited="conv")
    shape, eps = with_states(config, shape, recurrent), config.within("norm_eps", EPS)
    layers, mlp = (HubLayer(index, shape, eps, inner_size) for index in range(shape.num_layers)), mlp_of(shape)
    return Architecture(
        shape=shape,
        embedding=Embedding(name="model.embed_tokens"),
        layers=tuple(
            Layer(
                mixer=_convolution(config, layer) if recurrent[layer.index] else _attention(layer),
                mlp=mlp(layer),
                attention_norm=layer.norm("operator_norm"),
                mlp_norm=layer.norm("ffn_norm"),
            )
            for layer in layers
        ),
        norm=Norm("model.embedding_norm", shape.hidden_size, eps),
        head=Head(name=None if config.flag("tie_word_embeddings") else "lm_head"),
        ropes=(checked_rope(rope, shape.head_dim),),
    )


def _inner_size(config: ConfigReader) -> int:
    named = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    inner = config.integer(named, most=MOST_INNER)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return inner
    multiple = config.integer("block_multiple_of", 256, most=MOST_INNER)
    inner = int(config.within("block_ffn_dim_multiplier", FACTOR) * inner)
    return multiple * -(-max(inner, 1) // multiple)


def _convolution(config: ConfigReader, layer: HubLayer) -> ShortConvolution:
    hidden, bias = layer.shape.hidden_size, config.flag("conv_bias", False)
    taps = config.integer("conv_L_cache", most=MOST_TAPS)
    return ShortConvolution(
        inputs=layer.projection("conv", hidden, {"in_proj": 3 * hidden}, bias=bias),
        conv=Convolution(layer.named("conv.conv"), hidden, taps, bias),
        output=layer.projection("conv", hidden, {"out_proj": hidden}, bias=bias),
    )


def _attention(layer: HubLayer) -> Attention:
    shape = layer.shape
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    query_norm, key_norm = (layer.norm(f"self_attn.{part}_layernorm", shape.head_dim) for part in ("q", "k"))
    return Attention(
        spec=AttentionSpec(scale=shape.head_dim**-0.5),
        qkv=layer.projection("self_attn", shape.hidden_size, {"q_proj": queries, "k_proj": keys, "v_proj": keys}),
        output=layer.projection("self_attn", queries, {"out_proj": shape.hidden_size}),
        rope=0,
        qk_norm=QKNorm(query_norm, key_norm, over="head"),
    )


def gated_mlp(layer: HubLayer) -> MLP:
    hidden, inner = layer.shape.hidden_size, layer.inner_size
    return MLP(
        up=layer.projection("feed_forward", hidden, {"w1": inner, "w3": inner}),
        down=layer.projection("feed_forward", inner, {"w2": hidden}),
        activation="silu",
        gated=True,
    )


def gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return gguf.rotary_config(facts) | {
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": facts.integer("shortconv.l_cache"),
        "conv_bias": gguf.in_some_block(facts, "shortconv.conv.bias"),
        "layer_types": gguf.named_layers(facts, recurrent="conv"),
    }


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    # The converter has done so.
    return gguf_config(facts) | {"block_auto_adjust_ff_dim": False}


_GGUF_BLOCKS = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

GGUF = gguf.GgufNames(
    "lfm2",
    _GGUF_BLOCKS,
    _gguf_config,
    # The final norm, despite its name.
    roots={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    reshape={"shortconv.conv": gguf.filters},
    recurrent=True,
)
FAMILY = Family("LFM2", "lfm2", "Lfm2ForCausalLM", "Lfm2Model", describe, tied=True, gguf=GGUF)

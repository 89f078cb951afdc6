"""LFM2: short convolutions in most layers, attention with normed heads in the others."""

from collections.abc import Mapping

from ostro.models.architecture import (
    MLP,
    Architecture,
    Attention,
    AttentionSpec,
    Convolution,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Norm,
    Part,
    Projection,
    QKNorm,
    ShortConvolution,
)
from ostro.models.config import EPS, FACTOR, MOST_INNER, MOST_TAPS, ConfigReader
from ostro.models.families.common import decoder_shape, limited_layers, with_states
from ostro.models.family import Family
from ostro.models.rope_settings import checked_rope, rope_settings

_DEFAULTS: Mapping[str, object] = {
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    # Here, a null says that there is none.
    multiplier = {"block_ffn_dim_multiplier": config.values.get("block_ffn_dim_multiplier", 1.0)}
    config = ConfigReader({**config.with_defaults(_DEFAULTS).values, **multiplier}, config.source)
    shape, rope = decoder_shape(config, max_seq_len), rope_settings(config)
    attends = config.indices("full_attn_idxs") if config.get("full_attn_idxs") is not None else range(shape.num_layers)
    recurrent = limited_layers(config, shape.num_layers, otherwise=lambda layer: layer not in attends, limited="conv")
    shape, inner, eps = with_states(config, shape, recurrent), _inner_size(config), config.within("norm_eps", EPS)
    return Architecture(
        shape=shape,
        embedding=Embedding(name="model.embed_tokens"),
        layers=tuple(
            Layer(
                mixer=_convolution(config, shape, name) if conv else _attention(shape, name, eps),
                mlp=_mlp(shape, f"{name}.feed_forward", inner),
                attention_norm=Norm(f"{name}.operator_norm", shape.hidden_size, eps),
                mlp_norm=Norm(f"{name}.ffn_norm", shape.hidden_size, eps),
            )
            for name, conv in ((f"model.layers.{index}", each) for index, each in enumerate(recurrent))
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
    multiple = config.integer("block_multiple_of", most=MOST_INNER)
    inner = int(config.within("block_ffn_dim_multiplier", FACTOR) * inner)
    return multiple * -(-max(inner, 1) // multiple)


def _convolution(config: ConfigReader, shape: ModelShape, name: str) -> ShortConvolution:
    hidden, bias = shape.hidden_size, config.flag("conv_bias", False)
    return ShortConvolution(
        inputs=Projection(hidden, (Part(f"{name}.conv.in_proj", 3 * hidden),), bias=bias),
        conv=Convolution(f"{name}.conv.conv", hidden, config.integer("conv_L_cache", most=MOST_TAPS), bias),
        output=Projection(hidden, (Part(f"{name}.conv.out_proj", hidden),), bias=bias),
    )


def _attention(shape: ModelShape, name: str, eps: float) -> Attention:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    query_norm, key_norm = (Norm(f"{name}.self_attn.{part}_layernorm", shape.head_dim, eps) for part in ("q", "k"))
    return Attention(
        spec=AttentionSpec(scale=shape.head_dim**-0.5),
        qkv=Projection(shape.hidden_size, tuple(Part(f"{name}.self_attn.{part}", size) for part, size in rows.items())),
        output=Projection(queries, (Part(f"{name}.self_attn.out_proj", shape.hidden_size),)),
        rope=0,
        qk_norm=QKNorm(query_norm, key_norm, over="head"),
    )


def _mlp(shape: ModelShape, name: str, inner: int) -> MLP:
    return MLP(
        up=Projection(shape.hidden_size, (Part(f"{name}.w1", inner), Part(f"{name}.w3", inner))),
        down=Projection(inner, (Part(f"{name}.w2", shape.hidden_size),)),
        activation="silu",
        gated=True,
    )


FAMILY = Family("LFM2", "lfm2", "Lfm2ForCausalLM", "Lfm2Model", describe, tied=True)

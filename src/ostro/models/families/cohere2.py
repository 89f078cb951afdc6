"""Cohere 2 (Command R7B, Command A): attention and MLP in parallel after one layer norm without bias, sliding windows
on three of four layers, and scaled logits. Only layers with a window rotate queries and keys, neighbouring dimensions
together.
"""

from ostro.models.architecture import Architecture, AttentionSpec, Embedding, Head, Layer, ModelShape, Norm
from ostro.models.config import EPS, MOST_INNER, MOST_LAYERS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import HubLayer, activation, decoder_shape, sliding_layers
from ostro.models.family import Family
from ostro.models.rope_settings import checked_rope, rope_settings
from ostro.models.row_order import Pairs

_PERIOD, _WINDOW, _LOGIT_SCALE = 4, 4096, 0.0625


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    rope = rope_settings(config)
    shape = decoder_shape(config, max_seq_len, rope)
    period = config.integer("sliding_window_pattern", _PERIOD, most=MOST_LAYERS)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: (layer + 1) % period != 0)
    eps = config.within("layer_norm_eps", EPS, 1e-5)
    tied = config.flag("tie_word_embeddings")
    return Architecture(
        shape=shape,
        embedding=Embedding(name="model.embed_tokens"),
        layers=tuple(_layer(config, shape, eps, index, sliding) for index, sliding in enumerate(slides)),
        norm=_norm("model.norm", shape, eps),
        head=Head(name=None if tied else "lm_head", scale=config.number("logit_scale", _LOGIT_SCALE)),
        ropes=(checked_rope(rope, shape.head_dim),),
    )


def _layer(config: ConfigReader, shape: ModelShape, eps: float, index: int, sliding: bool) -> Layer:
    names = HubLayer(index, shape, eps, config.integer("intermediate_size", most=MOST_INNER))
    bias, window = config.flag("attention_bias", False), config.integer("sliding_window", _WINDOW)
    norm = _norm(f"model.layers.{index}.input_layernorm", shape, eps)
    return Layer(
        mixer=names.attention(
            AttentionSpec(scale=shape.head_dim**-0.5, window=window if sliding else None),
            rope=0 if sliding else None,
            qkv_bias=bias,
            output_bias=bias,
            order=Pairs(shape.head_dim, shape.head_dim) if sliding else None,
        ),
        mlp=names.gated_mlp(activation(config, "hidden_act", "silu")),
        attention_norm=norm,
        mlp_norm=norm,
        parallel=True,
    )


def _norm(name: str, shape: ModelShape, eps: float) -> Norm:
    return Norm(name, shape.hidden_size, eps, kind="layer", biased=False)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return gguf.rotary_config(facts) | {
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "attention_bias": facts.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": facts.integer("attention.sliding_window", _WINDOW),
        "layer_types": gguf.layer_types(facts, period=_PERIOD),
        "logit_scale": facts.number("logit_scale", _LOGIT_SCALE),
    }


FAMILY = Family(
    "Command R7B, Command A (Cohere 2)",
    "cohere2",
    "Cohere2ForCausalLM",
    "Cohere2Model",
    describe,
    tied=True,
    gguf=gguf.GgufNames("cohere2", gguf.ATTENTION | gguf.MLP | {"attn_norm": "input_layernorm"}, _gguf_config),
)

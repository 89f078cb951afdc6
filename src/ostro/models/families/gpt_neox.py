"""GPT-NeoX and Pythia: layer norms, biases everywhere, a quarter of each head rotated, attention parallel to the MLP.

Checkpoints store queries, keys and values in one tensor, interleaved by head.
"""

from dataclasses import replace

from ostro.models.architecture import (
    MLP,
    Architecture,
    Attention,
    AttentionSpec,
    Embedding,
    Head,
    Layer,
    ModelShape,
    Norm,
    Part,
    Projection,
)
from ostro.models.config import EPS, MOST_INNER, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import activation, decoder_shape
from ostro.models.family import Family
from ostro.models.rope_settings import RopeSettings, checked_rope, rope_settings
from ostro.models.row_order import ByHead

_BACKBONE, _HEAD = "gpt_neox", "embed_out"


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    rope = _rope(config)
    shape = decoder_shape(config, max_seq_len, rope)
    # Every head has its own keys, whatever else the config says.
    shape = replace(shape, num_kv_heads=shape.num_heads)
    tied = config.flag("tie_word_embeddings")
    return Architecture(
        shape=shape,
        embedding=Embedding(name=f"{_BACKBONE}.embed_in"),
        layers=tuple(_layer(config, shape, f"{_BACKBONE}.layers.{index}") for index in range(shape.num_layers)),
        norm=_norm(config, shape, f"{_BACKBONE}.final_layer_norm"),
        head=Head(name=None if tied else _HEAD),
        ropes=(checked_rope(rope, shape.head_dim),),
    )


def _rope(config: ConfigReader) -> RopeSettings:
    table = {
        "rope_theta": config.get("rotary_emb_base"),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
        **(config.table("rope_scaling") or config.table("rope_parameters") or {}),
    }
    return rope_settings(config, table)


def _layer(config: ConfigReader, shape: ModelShape, name: str) -> Layer:
    hidden, inner = shape.hidden_size, config.integer("intermediate_size", most=MOST_INNER)
    width, bias = shape.num_heads * shape.head_dim, config.flag("attention_bias", True)
    order = ByHead(shape.num_heads, (shape.head_dim,) * 3)
    return Layer(
        mixer=Attention(
            spec=AttentionSpec(scale=shape.head_dim**-0.5),
            qkv=Projection(
                hidden,
                (Part(f"{name}.attention.query_key_value", 3 * width, order),),
                bias=bias,
            ),
            output=Projection(width, (Part(f"{name}.attention.dense", hidden),), bias=bias),
            rope=0,
        ),
        mlp=MLP(
            up=Projection(hidden, (Part(f"{name}.mlp.dense_h_to_4h", inner),), bias=True),
            down=Projection(inner, (Part(f"{name}.mlp.dense_4h_to_h", hidden),), bias=True),
            activation=activation(config, "hidden_act", "gelu"),
            gated=False,
        ),
        attention_norm=_norm(config, shape, f"{name}.input_layernorm"),
        mlp_norm=_norm(config, shape, f"{name}.post_attention_layernorm"),
        parallel=config.flag("use_parallel_residual", True),
    )


def _norm(config: ConfigReader, shape: ModelShape, name: str) -> Norm:
    return Norm(name, shape.hidden_size, config.within("layer_norm_eps", EPS, 1e-5), kind="layer")


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    config, head_dim = gguf.rotary_config(facts), gguf.head_dim(facts)
    return {
        **config,
        "layer_norm_eps": facts.number("attention.layer_norm_epsilon"),
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": facts.integer("rope.dimension_count", head_dim) / max(head_dim, 1),
        "hidden_act": "gelu",
        "use_parallel_residual": facts.flag("use_parallel_residual", True),
        "attention_bias": facts.has_tensor("blk.0.attn_qkv.bias"),
    }


FAMILY = Family(
    "GPT-NeoX, Pythia",
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "GPTNeoXModel",
    describe,
    backbone=_BACKBONE,
    head=_HEAD,
    gguf=gguf.GgufNames(
        "gptneox",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        _gguf_config,
        block_prefix=f"{_BACKBONE}.layers",
        roots={
            "token_embd": f"{_BACKBONE}.embed_in",
            "output_norm": f"{_BACKBONE}.final_layer_norm",
            "output": _HEAD,
        },
        by_head=frozenset({"attn_qkv"}),
    ),
)

"""StarCoder2: Llama's attention with a sliding window, layer norms, a plain MLP, and biases everywhere."""

from ostro.models.architecture import (
    MLP,
    Architecture,
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
from ostro.models.families.common import HubLayer, activation, decoder_shape
from ostro.models.family import Family
from ostro.models.rope_settings import checked_rope, rope_settings


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    eps = config.within("norm_epsilon", EPS, 1e-5)
    tied = config.flag("tie_word_embeddings")
    return Architecture(
        shape=shape,
        embedding=Embedding(name="model.embed_tokens"),
        layers=tuple(_layer(config, shape, eps, index) for index in range(shape.num_layers)),
        norm=Norm("model.norm", shape.hidden_size, eps, kind="layer"),
        head=Head(name=None if tied else "lm_head"),
        ropes=(checked_rope(rope_settings(config), shape.head_dim),),
    )


def _layer(config: ConfigReader, shape: ModelShape, eps: float, index: int) -> Layer:
    hidden, inner = shape.hidden_size, config.integer("intermediate_size", most=MOST_INNER)
    name, bias = f"model.layers.{index}", config.flag("use_bias", True)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=config.optional_integer("sliding_window"))
    return Layer(
        mixer=HubLayer(index, shape, eps, inner).attention(spec, qkv_bias=bias, output_bias=bias),
        mlp=MLP(
            up=Projection(hidden, (Part(f"{name}.mlp.c_fc", inner),), bias=bias),
            down=Projection(inner, (Part(f"{name}.mlp.c_proj", hidden),), bias=bias),
            activation=activation(config, "hidden_act", "gelu_pytorch_tanh"),
            gated=False,
        ),
        attention_norm=Norm(f"{name}.input_layernorm", hidden, eps, kind="layer"),
        mlp_norm=Norm(f"{name}.post_attention_layernorm", hidden, eps, kind="layer"),
    )


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return {
        **gguf.rotary_config(facts),
        "norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": facts.has_tensor("blk.0.attn_q.bias"),
        # Converters omit the window, and llama.cpp then attends to everything.
        "sliding_window": facts.integer("attention.sliding_window", 0) or None,
    }


FAMILY = Family(
    "StarCoder2",
    "starcoder2",
    "Starcoder2ForCausalLM",
    "Starcoder2Model",
    describe,
    tied=True,
    gguf=gguf.GgufNames(
        "starcoder2",
        gguf.ATTENTION | gguf.PRE_NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _gguf_config,
    ),
)

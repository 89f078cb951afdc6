"""GPT-2: learned positions, layer norms, biases everywhere, and matrices that checkpoints store as [in, out]."""

from ostro.errors import UnsupportedModel
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
from ostro.models.config import EPS, MOST_HEADS, MOST_HIDDEN, MOST_INNER, MOST_LAYERS, MOST_VOCAB, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, served_context
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    if config.flag("add_cross_attention", False):
        raise UnsupportedModel("GPT-2 with cross-attention is not supported; only its decoder-only models are.")
    shape = _shape(config, max_seq_len)
    tied = config.flag("tie_word_embeddings")
    return Architecture(
        shape=shape,
        embedding=Embedding(name="transformer.wte", positions=Part("transformer.wpe", config.integer("n_positions"))),
        layers=tuple(_layer(config, shape, index) for index in range(shape.num_layers)),
        norm=_norm(config, shape, "transformer.ln_f"),
        head=Head(name=None if tied else "lm_head"),
    )


def _shape(config: ConfigReader, max_seq_len: int | None) -> ModelShape:
    hidden, heads = config.integer("n_embd", most=MOST_HIDDEN), config.integer("n_head", most=MOST_HEADS)
    if hidden % heads:
        raise config.bad("n_embd", hidden, f"a multiple of 'n_head' ({heads})")
    positions = config.integer("n_positions")
    return ModelShape(
        vocab_size=config.integer("vocab_size", most=MOST_VOCAB),
        hidden_size=hidden,
        num_layers=config.integer("n_layer", most=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_seq_len=served_context(max_seq_len or positions, positions),
    )


def _layer(config: ConfigReader, shape: ModelShape, index: int) -> Layer:
    name, hidden = f"transformer.h.{index}", shape.hidden_size
    inner = config.integer("n_inner", 4 * hidden, most=MOST_INNER)

    def projection(part: str, columns: int, rows: int) -> Projection:
        return Projection(columns, (Part(f"{name}.{part}", rows),), bias=True, transposed=True)

    return Layer(
        mixer=Attention(
            spec=AttentionSpec(scale=_attention_scale(config, shape, index)),
            qkv=projection("attn.c_attn", hidden, 3 * hidden),
            output=projection("attn.c_proj", hidden, hidden),
            rope=None,
        ),
        mlp=MLP(
            up=projection("mlp.c_fc", hidden, inner),
            down=projection("mlp.c_proj", inner, hidden),
            activation=activation(config, "activation_function", "gelu_new"),
            gated=False,
        ),
        attention_norm=_norm(config, shape, f"{name}.ln_1"),
        mlp_norm=_norm(config, shape, f"{name}.ln_2"),
    )


def _norm(config: ConfigReader, shape: ModelShape, name: str) -> Norm:
    return Norm(name, shape.hidden_size, config.within("layer_norm_epsilon", EPS, 1e-5), kind="layer")


def _attention_scale(config: ConfigReader, shape: ModelShape, layer: int) -> float:
    scale = shape.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.flag("scale_attn_by_inverse_layer_idx", False) else scale


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    context = facts.integer("context_length")
    return {
        "n_embd": facts.integer("embedding_length"),
        "n_inner": facts.integer("feed_forward_length"),
        "n_layer": facts.integer("block_count"),
        "n_head": facts.integer("attention.head_count"),
        "n_positions": context,
        "n_ctx": context,
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    if not settings.flag("use_bias"):
        raise UnsupportedModel("Levanter's type 'gpt2' without biases (use_bias) is not supported; with them it is.")
    hidden = settings.integer("hidden_dim")
    return {
        "n_embd": hidden,
        "n_inner": hidden * settings.integer("mlp_scale"),
        "n_layer": settings.integer("num_layers"),
        "n_head": settings.integer("num_heads"),
        "n_positions": levanter.context(settings),
        "layer_norm_epsilon": settings.number("layer_norm_epsilon"),
        "activation_function": settings.text("activation_function"),
        "scale_attn_by_inverse_layer_idx": settings.flag("scale_attn_by_inverse_layer_idx"),
    }


_LEVANTER = levanter.LevanterNames(
    type="gpt2",
    defaults={
        "max_seq_len": 1024,
        "hidden_dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "mlp_scale": 4,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    own_settings=frozenset(
        ("mlp_scale", "use_bias", "scale_attn_by_inverse_layer_idx", "embed_pdrop", "resid_pdrop", "attn_pdrop")
    ),
    like_llama=False,
    config=_levanter_config,
)

FAMILY = Family(
    "GPT-2",
    "gpt2",
    "GPT2LMHeadModel",
    "GPT2Model",
    describe,
    backbone="transformer",
    tied=True,
    gguf=gguf.GgufNames(
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        _gguf_config,
        block_prefix="transformer.h",
        roots={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        transpose=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    levanter=(_LEVANTER,),
)

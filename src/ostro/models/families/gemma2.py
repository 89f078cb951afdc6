"""Gemma 2: norms before and after attention and MLP, scaled embeddings, soft-capped scores and logits, and a sliding
window on every other layer.

Norm weights are stored as their difference from one.
"""

from collections.abc import Mapping, Sequence

from ostro.models.architecture import Architecture, AttentionSpec, Layer, ModelShape
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers, sliding_layers
from ostro.models.family import Family
from ostro.models.rope_settings import RopeSettings

NORM_OFFSET = 1.0
_SOFTCAP = (1e-3, 1e6)


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: layer % 2 == 0)
    return around(config, shape, layers(config, shape, slides))


def layers(
    config: ConfigReader,
    shape: ModelShape,
    slides: Sequence[bool],
    *,
    normed_heads: bool = False,
    own_rope: bool = False,
) -> list[Layer]:
    """With `own_rope`, sliding-window layers use the second of the model's ropes."""
    scale = config.number("query_pre_attn_scalar", least=1e-3, most=1e9) ** -0.5
    window = config.optional_integer("sliding_window")
    softcap = config.optional_number("attn_logit_softcapping", _SOFTCAP)
    bias, act = config.flag("attention_bias", False), activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return [
        layer.sandwich_norm(
            layer.attention(
                AttentionSpec(scale=scale, window=window if sliding else None, softcap=softcap),
                rope=int(sliding and own_rope),
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=layer.head_norms() if normed_heads else None,
            ),
            layer.gated_mlp(act),
        )
        for layer, sliding in zip(hub_layers(config, shape, norm_offset=NORM_OFFSET), slides, strict=True)
    ]


def around(
    config: ConfigReader, shape: ModelShape, layers: Sequence[Layer], ropes: Sequence[RopeSettings] | None = None
) -> Architecture:
    return decoder(
        config,
        shape,
        layers,
        ropes=ropes,
        norm_offset=NORM_OFFSET,
        embedding_scale=shape.hidden_size**0.5,
        logit_softcap=config.optional_number("final_logit_softcapping", _SOFTCAP),
    )


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return gguf.decoder_config(facts) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": facts.integer("attention.sliding_window", 4096),
        "layer_types": gguf.layer_types(facts, period=2),
        "attn_logit_softcapping": facts.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": facts.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": gguf_query_scale(facts, layers_of_27b=46),
    }


def gguf_query_scale(facts: gguf.GgufFacts, layers_of_27b: int) -> int:
    """Gemma divides queries by the root of this. GGUF does not store it; only the 27B models differ from head_dim."""
    if facts.integer("block_count") == layers_of_27b:
        return facts.integer("embedding_length") // max(facts.integer("attention.head_count"), 1)
    return gguf.head_dim(facts)


LEVANTER_DEFAULTS: Mapping[str, object] = {
    "max_seq_len": 8192,
    "hidden_dim": 2048,
    "intermediate_dim": 16384,
    "num_layers": 18,
    "num_heads": 8,
    "num_kv_heads": 1,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    """As Levanter computes it: without sliding windows, and without a cap on logits."""
    act, softcap = settings.text("activation_function"), settings.get("attn_logit_softcapping")
    return {
        "hidden_activation": "gelu_pytorch_tanh" if act == "gelu_new" else act,
        "query_pre_attn_scalar": head_dim,
        "attn_logit_softcapping": None if softcap is None else settings.number("attn_logit_softcapping"),
        "layer_types": ["full_attention"] * settings.integer("num_layers"),
    }


FAMILY = Family(
    "Gemma 2",
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Model",
    describe,
    tied=True,
    gguf=gguf.GgufNames(
        "gemma2", gguf.ATTENTION | gguf.MLP | gguf.SANDWICH_NORMS, _gguf_config, subtract_one=gguf.NORMS
    ),
    levanter=(
        levanter.LevanterNames(
            type="gemma2",
            defaults={**LEVANTER_DEFAULTS, "attn_logit_softcapping": 50.0},
            head_dim="stored",
            config=levanter_config,
        ),
    ),
)

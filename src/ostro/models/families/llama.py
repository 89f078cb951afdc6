"""Llama 1 to 3.x, and models of the same architecture, such as SmolLM2."""

from dataclasses import replace

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families import mixtral
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None, *, window: int | None = None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=window)
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    act = activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(
            layer.attention(spec, qkv_bias=attention_bias, output_bias=attention_bias),
            layer.gated_mlp(act, bias=mlp_bias),
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


def gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    # In files that predate the key length, rotation covers the whole head.
    rotated = facts.integer("rope.dimension_count", gguf.head_dim(facts))
    return gguf.decoder_config(facts) | {"head_dim": facts.integer("attention.key_length", rotated)}


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    config = gguf_config(facts)
    if not facts.integer("expert_count", 0):
        return config
    # Llama with experts is Mixtral.
    named: gguf.Config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return config | named | gguf.expert_config(facts)


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    config = levanter.llama_config(settings, head_dim)
    if not settings.flag("use_qk_norm"):
        return config
    # Llama with normed query and key heads is Qwen 3.
    return config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


# Mistral, SmolLM2 and Mixtral files also say llama, and compute the same.
GGUF = gguf.GgufNames(
    "llama",
    gguf.ATTENTION | gguf.MLP | gguf.PRE_NORMS,
    gguf_config,
    rotate_halves=frozenset({"attn_q", "attn_k"}),
)
FAMILY = Family(
    "Llama 1 to 3.x, SmolLM2",
    "llama",
    "LlamaForCausalLM",
    "LlamaModel",
    describe,
    gguf=replace(GGUF, blocks={**GGUF.blocks, **mixtral.NAMES.by_gguf_name}, config=_gguf_config),
    levanter=(
        levanter.LevanterNames(
            type="llama",
            defaults=levanter.LLAMA,
            own_settings=frozenset({"use_qk_norm"}),
            head_dim="set",
            config=_levanter_config,
        ),
    ),
)

"""Gemma 1: Llama with scaled embeddings, GELU, and norm weights that are stored as their difference from one."""

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import gemma2
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("Gemma with bidirectional attention is not supported; only its causal models are.")
    shape = decoder_shape(config, max_seq_len)
    spec, bias = AttentionSpec(scale=shape.head_dim**-0.5), config.flag("attention_bias", False)
    act = activation(config, "hidden_act", "gelu_pytorch_tanh")
    if act == "gelu":
        # The first releases say "gelu" but were trained with the approximation.
        act = "gelu_tanh"
    layers = [
        layer.pre_norm(layer.attention(spec, qkv_bias=bias, output_bias=bias), layer.gated_mlp(act))
        for layer in hub_layers(config, shape, norm_offset=gemma2.NORM_OFFSET)
    ]
    return decoder(config, shape, layers, norm_offset=gemma2.NORM_OFFSET, embedding_scale=shape.hidden_size**0.5)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return gguf.decoder_config(facts) | {"hidden_act": "gelu_pytorch_tanh"}


def _levanter_config(settings: levanter.LevanterSettings, head_dim: int) -> levanter.Config:
    if settings.text("activation_function") == "gelu":
        # In a config.json that word means the approximation.
        raise UnsupportedModel("Levanter's type 'gemma' with the exact GELU is not supported; gelu_new is.")
    return {"hidden_act": settings.text("activation_function")}


FAMILY = Family(
    "Gemma 1",
    "gemma",
    "GemmaForCausalLM",
    "GemmaModel",
    describe,
    tied=True,
    gguf=gguf.GgufNames("gemma", gguf.ATTENTION | gguf.MLP | gguf.PRE_NORMS, _gguf_config, subtract_one=gguf.NORMS),
    levanter=(
        levanter.LevanterNames(
            type="gemma", defaults=gemma2.LEVANTER_DEFAULTS, head_dim="stored", config=_levanter_config
        ),
    ),
)

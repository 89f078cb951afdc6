"""OLMoE: a mixture of experts in every layer; queries and keys are normed over all heads together."""

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import EXPERT_NAMES, activation, decoder, decoder_shape, hub_layers, mixture
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModel(f"{config.source} sets 'clip_qkv', which Ostro does not support.")
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5)
    bias, act = config.flag("attention_bias", False), activation(config, "hidden_act", "silu")
    sizes, normalized = mixture(config, shape), config.flag("norm_topk_prob", False)
    layers = [
        layer.pre_norm(
            layer.attention(spec, qkv_bias=bias, output_bias=bias, qk_norm=layer.width_norms()),
            layer.experts(sizes, act, normalized=normalized),
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    return gguf.decoder_config(facts) | gguf.expert_config(facts)


FAMILY = Family(
    "OLMoE",
    "olmoe",
    "OlmoeForCausalLM",
    "OlmoeModel",
    describe,
    gguf=gguf.GgufNames(
        "olmoe", gguf.ATTENTION | gguf.QK_NORMS | EXPERT_NAMES.by_gguf_name | gguf.PRE_NORMS, _gguf_config
    ),
)

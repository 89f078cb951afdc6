"""Qwen 3: like Qwen 2, but query and key heads are normed and usually have no biases."""

from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers
from ostro.models.families.qwen2 import attention_specs, gguf_config
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    bias, act = config.flag("attention_bias", False), activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(
            layer.attention(spec, qkv_bias=bias, output_bias=bias, qk_norm=layer.head_norms()), layer.gated_mlp(act)
        )
        for layer, spec in zip(hub_layers(config, shape), attention_specs(config, shape), strict=True)
    ]
    return decoder(config, shape, layers)


FAMILY = Family(
    "Qwen 3",
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    describe,
    wrappers=("Qwen3VLForConditionalGeneration",),
    gguf=gguf.GgufNames("qwen3", gguf.ATTENTION | gguf.QK_NORMS | gguf.MLP | gguf.PRE_NORMS, gguf_config),
    levanter=(
        levanter.LevanterNames(
            type="qwen3", defaults=levanter.LLAMA, own_settings=frozenset({"use_qk_norm"}), head_dim="set"
        ),
    ),
)

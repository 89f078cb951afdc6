"""OLMo-2: norms after attention and MLP instead of before; queries and keys are normed over all heads together."""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families import levanter_names as levanter
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5)
    bias, act = config.flag("attention_bias", False), activation(config, "hidden_act", "silu")
    layers = [
        layer.post_norm(
            layer.attention(spec, qkv_bias=bias, output_bias=bias, qk_norm=layer.width_norms()), layer.gated_mlp(act)
        )
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    config = gguf.decoder_config(facts)
    window = facts.integer("attention.sliding_window", 0)
    if not window:
        return config
    # GGUF stores OLMo 3 as OLMo 2 with sliding windows.
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": gguf.layer_types(facts, period=4),
    }


FAMILY = Family(
    "OLMo-2",
    "olmo2",
    "Olmo2ForCausalLM",
    "Olmo2Model",
    describe,
    gguf=gguf.GgufNames("olmo2", gguf.ATTENTION | gguf.QK_NORMS | gguf.MLP | gguf.POST_NORMS, _gguf_config),
    levanter=(
        levanter.LevanterNames(
            type="olmo2",
            defaults={**levanter.LLAMA, "max_seq_len": 4096, "layer_norm_epsilon": 1e-6},
            own_settings=frozenset({"attention_bias"}),
        ),
    ),
)

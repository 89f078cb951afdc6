"""Phi-3 and Phi-4-mini: Llama with a sliding window, stored with fused projections."""

from ostro.models.architecture import Architecture, AttentionSpec
from ostro.models.config import ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import activation, decoder, decoder_shape, hub_layers
from ostro.models.family import Family


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    shape = decoder_shape(config, max_seq_len)
    spec = AttentionSpec(scale=shape.head_dim**-0.5, window=config.optional_integer("sliding_window"))
    act = activation(config, "hidden_act", "silu")
    layers = [
        layer.pre_norm(layer.attention(spec, stored_fused=True), layer.gated_mlp(act, stored_fused=True))
        for layer in hub_layers(config, shape)
    ]
    return decoder(config, shape, layers)


def _gguf_config(facts: gguf.GgufFacts) -> gguf.Config:
    context = facts.integer("context_length")
    return gguf.decoder_config(facts) | {
        "partial_rotary_factor": facts.integer("rope.dimension_count", gguf.head_dim(facts))
        / max(gguf.head_dim(facts), 1),
        "original_max_position_embeddings": facts.integer("rope.scaling.original_context_length", context),
        "sliding_window": facts.integer("attention.sliding_window", 0) or None,
    }


FAMILY = Family(
    "Phi-3, Phi-4-mini",
    "phi3",
    "Phi3ForCausalLM",
    "Phi3Model",
    describe,
    gguf=gguf.GgufNames(
        "phi3",
        gguf.PRE_NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _gguf_config,
    ),
)

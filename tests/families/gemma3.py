"""Gemma 3: Gemma 2 with normed heads instead of soft caps, and a rotation of its own for windowed layers."""

from family_case import (
    GGUF_DECODER,
    GGUF_WIDE_HEADS,
    LEVANTER_SETTINGS,
    FamilyCase,
    GgufCase,
    LevanterCase,
    with_one_added_to_norms,
)

CASE = FamilyCase(
    model_type="gemma3_text",
    config={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "rope_theta": 20000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    variants={
        "third-layer": {"sliding_window_pattern": 3, "num_hidden_layers": 4},
        "biases": {"final_logit_softcapping": 10.0, "attention_bias": True},
    },
    ropes=2,
    numbers=("query_pre_attn_scalar",),
    gguf={
        "": GgufCase(
            config={
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 8,
                "num_hidden_layers": 7,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            metadata={
                **GGUF_DECODER,
                **GGUF_WIDE_HEADS,
                "attention.sliding_window": 8,
                "block_count": 7,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
        )
    },
    gguf_converted=with_one_added_to_norms,
    levanter={
        "gemma3": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "gemma3", "rope": {"theta": 5000}},
            config={
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 8,
                "layer_types": ["full_attention"] * 3,
                "head_dim": 8,
                "tie_word_embeddings": True,
                "rope_theta": 5000.0,
            },
        )
    },
)

"""Gemma 2: norms before and after, soft caps, every other layer windowed."""

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
    model_type="gemma2",
    config={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "sliding_window": 12,
    },
    variants={
        "low-caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "num_hidden_layers": 4},
        "untied": {"tie_word_embeddings": False},
    },
    numbers=("rope_theta", "query_pre_attn_scalar"),
    gguf={
        "": GgufCase(
            config={
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 8,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            metadata={
                **GGUF_DECODER,
                **GGUF_WIDE_HEADS,
                "attention.sliding_window": 8,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        )
    },
    gguf_converted=with_one_added_to_norms,
    levanter={
        "gemma2": LevanterCase(
            settings={
                **LEVANTER_SETTINGS,
                "type": "gemma2",
                "attn_logit_softcapping": 5.0,
                "tie_word_embeddings": False,
            },
            config={
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 8,
                "layer_types": ["full_attention"] * 3,
                "head_dim": 8,
                "attn_logit_softcapping": 5.0,
            },
        )
    },
)

"""Gemma: an offset of one in norms, a scaled embedding that is tied to the head, gated GELU."""

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
    model_type="gemma",
    # The tanh form, whatever early files call it.
    variants={"gelu": {"hidden_act": "gelu"}},
    gguf={
        "": GgufCase(config={"head_dim": 32, "tie_word_embeddings": True}, metadata={**GGUF_DECODER, **GGUF_WIDE_HEADS})
    },
    gguf_converted=with_one_added_to_norms,
    levanter={
        "gemma": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "gemma", "query_pre_attn_scalar": 3.0},
            config={"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        )
    },
)

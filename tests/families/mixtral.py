"""Mixtral: Mistral with experts."""

from family_case import (
    GGUF_DECODER,
    GGUF_EXPERTS,
    LEVANTER_SETTINGS,
    LOCAL_EXPERTS,
    FamilyCase,
    GgufCase,
    LevanterCase,
    with_neighbours_rotated,
)

CASE = FamilyCase(
    model_type="mixtral",
    config={**LOCAL_EXPERTS, "rope_theta": 500.0, "sliding_window": 12},
    variants={"no-window": {"sliding_window": None}},
    mixture=True,
    gguf={
        "": GgufCase(
            config={**LOCAL_EXPERTS, "tie_word_embeddings": False},
            metadata={**GGUF_DECODER, **GGUF_EXPERTS, "rope.dimension_count": 16},
            architecture="llama",
        )
    },
    gguf_converted=with_neighbours_rotated,
    levanter={
        "mixtral": LevanterCase(
            settings={
                **LEVANTER_SETTINGS,
                "type": "mixtral",
                "n_routed_experts": 5,
                "num_experts_per_tok": 3,
                "lbl_coef": 0.1,
            },
            config={"rms_norm_eps": 1e-6, "num_local_experts": 5, "num_experts_per_tok": 3},
        )
    },
)

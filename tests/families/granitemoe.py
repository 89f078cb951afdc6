"""Granite 3 MoE: Granite's scales, and experts whose gates and ups are one tensor."""

from family_case import (
    GGUF_DECODER,
    GGUF_EXPERTS,
    GRANITE_SCALES,
    LOCAL_EXPERTS,
    FamilyCase,
    GgufCase,
    with_neighbours_rotated,
)

CASE = FamilyCase(
    model_type="granitemoe",
    config={**GRANITE_SCALES, **LOCAL_EXPERTS},
    variants={"tied": {"tie_word_embeddings": True}},
    mixture=True,
    gguf={
        "": GgufCase(
            config={
                **LOCAL_EXPERTS,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.4,
                "tie_word_embeddings": False,
            },
            metadata={**GGUF_DECODER, **GGUF_EXPERTS, "attention.scale": 0.2, "residual_scale": 0.4},
        )
    },
    gguf_converted=with_neighbours_rotated,
    gguf_rearranged=True,
)

"""GLM-4: half of each head rotated, in neighbouring pairs, and norms before and after."""

from family_case import GGUF_DECODER, GGUF_WIDE_HEADS, FamilyCase, GgufCase

CASE = FamilyCase(
    model_type="glm4",
    config={"partial_rotary_factor": 0.5},
    variants={"rotated-whole": {"attention_bias": False, "partial_rotary_factor": 1.0}},
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    gguf={
        "": GgufCase(
            config={"head_dim": 32, "tie_word_embeddings": False},
            metadata={**GGUF_DECODER, **GGUF_WIDE_HEADS, "rope.dimension_count": 16},
        )
    },
)

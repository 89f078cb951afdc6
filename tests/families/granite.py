"""Granite 3: Llama with scaled embeddings, residuals, scores and logits."""

from family_case import BIASES, GGUF_DECODER, GRANITE_SCALES, FamilyCase, GgufCase, with_neighbours_rotated

CASE = FamilyCase(
    model_type="granite",
    config=GRANITE_SCALES,
    variants={"biases": {**BIASES, "tie_word_embeddings": True}},
    gguf={
        "": GgufCase(
            config={**GRANITE_SCALES, "tie_word_embeddings": True},
            metadata={
                **GGUF_DECODER,
                "attention.scale": 0.2,
                "embedding_scale": 3.0,
                "residual_scale": 0.4,
                "logit_scale": 2.0,
                "rope.dimension_count": 16,
            },
        ),
        "scores-scaled-as-usual": GgufCase(config={"attention_multiplier": 0.25, "tie_word_embeddings": False}),
    },
    gguf_converted=with_neighbours_rotated,
)

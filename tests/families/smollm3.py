"""SmolLM3: Llama with layers that are not rotated."""

from family_case import GGUF_DECODER, FamilyCase, GgufCase, with_neighbours_rotated

CASE = FamilyCase(
    model_type="smollm3",
    config={"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    variants={
        "fourth-layer": {"rope_theta": 500.0, "num_hidden_layers": 4, "no_rope_layers": None},
        "windows": {
            "rope_theta": 500.0,
            "use_sliding_window": True,
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 1],
        },
    },
    gguf={
        "": GgufCase(
            config={"num_hidden_layers": 5, "tie_word_embeddings": True},
            metadata={**GGUF_DECODER, "block_count": 5, "rope.dimension_count": 16},
        )
    },
    gguf_converted=with_neighbours_rotated,
)

"""EXAONE 4: norms after attention and MLP, normed heads, windowed layers with rotation and others without."""

from family_case import GGUF_DECODER, FamilyCase, GgufCase

CASE = FamilyCase(
    model_type="exaone4",
    config={"sliding_window": 12, "sliding_window_pattern": 2},
    variants={
        "fourth-layer": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
        "no-window": {
            "sliding_window": None,
            "sliding_window_pattern": None,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] * 3,
        },
    },
    gguf={
        "": GgufCase(
            config={"sliding_window": 8, "num_hidden_layers": 5, "tie_word_embeddings": False},
            metadata={
                **GGUF_DECODER,
                "attention.sliding_window": 8,
                "block_count": 5,
                "attention.sliding_window_pattern": [True, True, True, False, True],
            },
        ),
        "no-window": GgufCase(
            config={"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
        ),
    },
)

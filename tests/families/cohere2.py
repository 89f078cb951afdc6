"""Command R7B and other models of Cohere: windowed layers with rotation, layer norms without biases, scaled logits."""

from family_case import GGUF_LAYER_NORMS, FamilyCase, GgufCase

CASE = FamilyCase(
    model_type="cohere2",
    config={"logit_scale": 0.5, "sliding_window": 12, "sliding_window_pattern": 2},
    variants={
        "layer-types": {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "biases": {"attention_bias": True, "logit_scale": 2.0, "num_hidden_layers": 4, "sliding_window_pattern": 4},
    },
    spelling={"rms_norm_eps": "layer_norm_eps"},
    gguf={
        "": GgufCase(
            config={"logit_scale": 2.0, "sliding_window": 8, "num_hidden_layers": 5, "tie_word_embeddings": True},
            metadata={
                **GGUF_LAYER_NORMS,
                "attention.head_count_kv": 2,
                "rope.freq_base": 50000.0,
                "rope.dimension_count": 16,
                "block_count": 5,
                "attention.sliding_window": 8,
                "logit_scale": 2.0,
            },
        )
    },
)

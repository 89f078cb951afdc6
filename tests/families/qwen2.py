"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and windows in its later layers."""

from family_case import GGUF_DECODER, LEVANTER_SETTINGS, YARN, FamilyCase, GgufCase, LevanterCase

CASE = FamilyCase(
    model_type="qwen2",
    variants={
        "unused-window": {"use_sliding_window": False, "sliding_window": 12},
        "windows": {
            "use_sliding_window": True,
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "max_window_layers": 1,
        },
        "layer-types": {
            "use_sliding_window": True,
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    },
    gguf={
        "yarn": GgufCase(
            config={
                "tie_word_embeddings": True,
                "rope_scaling": {**YARN, "original_max_position_embeddings": 64},
            },
            metadata={
                **GGUF_DECODER,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
        )
    },
    levanter={"qwen": LevanterCase(settings={**LEVANTER_SETTINGS, "type": "qwen"})},
)

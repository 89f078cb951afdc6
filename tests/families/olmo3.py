"""OLMo 3: OLMo 2 with windowed layers, whose rotation is never scaled."""

from family_case import GGUF_DECODER, LEVANTER_SETTINGS, YARN, FamilyCase, GgufCase, LevanterCase

CASE = FamilyCase(
    model_type="olmo3",
    config={
        "num_hidden_layers": 2,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": YARN,
    },
    variants={
        "fourth-layer": {"num_hidden_layers": 5, "layer_types": None, "rope_scaling": None},
        "yarn": {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {**YARN, "attention_factor": 1.2},
        },
    },
    ropes=2,
    gguf={
        "": GgufCase(
            config={"sliding_window": 8, "num_hidden_layers": 5, "tie_word_embeddings": False},
            metadata={
                **GGUF_DECODER,
                "attention.sliding_window": 8,
                "block_count": 5,
                "attention.sliding_window_pattern": [True, True, True, False, True],
            },
            architecture="olmo2",
        )
    },
    levanter={
        "olmo3": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "olmo3", "sliding_window": 4},
            config={"sliding_window": 4},
            layers="_layers",
            norms_of_all_heads=True,
        )
    },
)

"""OLMo 2: norms after attention and MLP, and over all heads of queries and of keys together."""

from family_case import LEVANTER_SETTINGS, FamilyCase, GgufCase, LevanterCase

CASE = FamilyCase(
    model_type="olmo2",
    variants={"biases": {"attention_bias": True}},
    gguf={"": GgufCase(config={"tie_word_embeddings": False})},
    levanter={
        "olmo2": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "olmo2"}, config={"rms_norm_eps": 1e-6}, norms_of_all_heads=True
        ),
        "olmo2-biased": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "olmo2", "attention_bias": True},
            config={"rms_norm_eps": 1e-6, "attention_bias": True},
            norms_of_all_heads=True,
        ),
    },
)

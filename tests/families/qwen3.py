"""Qwen 3: Llama with normed heads of queries and keys."""

from family_case import GGUF_DECODER, GGUF_WIDE_HEADS, LEVANTER_SETTINGS, FamilyCase, GgufCase, LevanterCase

CASE = FamilyCase(
    model_type="qwen3",
    variants={"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True}},
    gguf={
        "": GgufCase(
            config={"head_dim": 32, "tie_word_embeddings": False}, metadata={**GGUF_DECODER, **GGUF_WIDE_HEADS}
        )
    },
    levanter={
        "qwen3": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "qwen3", "layer_norm_epsilon": 1e-6},
            config={"rms_norm_eps": 1e-6},
        ),
        # What Levanter calls Llama.
        "llama-qk-norm": LevanterCase(settings={**LEVANTER_SETTINGS, "type": "llama", "use_qk_norm": True}),
    },
)

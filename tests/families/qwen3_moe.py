"""Qwen 3 MoE: normed heads, experts in some layers, plain MLPs in others."""

from family_case import (
    EXPERTS,
    GGUF_DECODER,
    GGUF_EXPERTS,
    GGUF_WIDE_HEADS,
    LEVANTER_SETTINGS,
    FamilyCase,
    GgufCase,
    LevanterCase,
)

CASE = FamilyCase(
    model_type="qwen3_moe",
    config={**EXPERTS, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    variants={
        "normalized": {"norm_topk_prob": True},
        "one-dense": {"mlp_only_layers": [0]},
        "some-dense": {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 12,
        },
    },
    mixture=True,
    gguf={
        "": GgufCase(
            config={
                **EXPERTS,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
                "head_dim": 32,
                "tie_word_embeddings": False,
            },
            metadata={**GGUF_DECODER, **GGUF_EXPERTS, **GGUF_WIDE_HEADS, "expert_feed_forward_length": 32},
        )
    },
    levanter={
        "qwen3_moe": LevanterCase(
            settings={
                **LEVANTER_SETTINGS,
                "type": "qwen3_moe",
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_dim": 24,
                "head_dim": 12,
                "use_qk_norm": True,
            },
            config={
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "head_dim": 12,
                "moe_intermediate_size": 24,
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "norm_topk_prob": True,
            },
        )
    },
)

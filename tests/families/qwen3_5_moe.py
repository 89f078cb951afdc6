"""Qwen 3.5 MoE and 3.6 MoE: Qwen 3.5 with experts in each layer."""

from family_case import (
    DELTA,
    EXPERT_SIZES,
    GGUF_DELTA,
    GGUF_DELTA_METADATA,
    GGUF_EXPERT_SIZES,
    FamilyCase,
    GgufCase,
    with_value_heads_tiled,
)

CASE = FamilyCase(
    model_type="qwen3_5_moe_text",
    config={**DELTA, **EXPERT_SIZES},
    gguf={
        "": GgufCase(
            config={
                **GGUF_DELTA,
                **EXPERT_SIZES,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 64,
            },
            # All layers have experts, and files no other width.
            metadata={
                key: value
                for key, value in {**GGUF_DELTA_METADATA, **GGUF_EXPERT_SIZES}.items()
                if key != "feed_forward_length"
            },
        )
    },
    gguf_converted=with_value_heads_tiled,
    gguf_rearranged=True,
    mixture=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
)

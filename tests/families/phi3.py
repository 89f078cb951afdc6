"""Phi 3 and 4: q, k and v in one matrix, gate and up in another, longrope."""

import numpy as np
from family_case import GGUF_DECODER, Config, FamilyCase, GgufCase, longrope


def config(head_dim: int) -> Config:
    return {"original_max_position_embeddings": 60, "rope_scaling": longrope(head_dim)}


FACTORS = longrope(12)

CASE = FamilyCase(
    model_type="phi3",
    config=config,
    variants={
        "window": {"rope_scaling": None, "sliding_window": 12},
        "half-rotated": {"rope_scaling": None, "partial_rotary_factor": 0.5},
    },
    spelling={"head_dim": None},
    projections=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    gguf={
        "": GgufCase(
            config={"sliding_window": 8},
            metadata={
                **GGUF_DECODER,
                "rope.dimension_count": 16,
                "attention.sliding_window": 8,
                "rope.scaling.original_context_length": 256,
            },
        ),
        "longrope-partial-rotary": GgufCase(
            config={
                "sliding_window": None,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 64,
                "rope_scaling": {**FACTORS, "rope_type": "longrope"},
            },
            metadata={
                **GGUF_DECODER,
                "rope.dimension_count": 12,
                "attention.sliding_window": 0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(64))),
            },
            extra={
                "rope_factors_long.weight": np.array(FACTORS["long_factor"], np.float32),
                "rope_factors_short.weight": np.array(FACTORS["short_factor"], np.float32),
            },
        ),
    },
)

"""Qwen 3.5 and 3.6: Qwen3-Next's layers with dense MLPs."""

import numpy as np
from family_case import (
    DELTA,
    GGUF_DELTA,
    GGUF_DELTA_METADATA,
    FamilyCase,
    GgufCase,
    with_value_heads_tiled,
)

CASE = FamilyCase(
    model_type="qwen3_5_text",
    config=DELTA,
    variants={
        "tied": {"tie_word_embeddings": True, "attention_bias": True, "linear_conv_kernel_dim": 3},
        "attention-first": {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    },
    gguf={
        "": GgufCase(config=GGUF_DELTA, metadata={**GGUF_DELTA_METADATA, "rope.dimension_sections": [3, 3, 2, 0]}),
        "tied": GgufCase(
            config={**GGUF_DELTA, "tie_word_embeddings": True, "attention_bias": True}, metadata=GGUF_DELTA_METADATA
        ),
        "guessing": GgufCase(
            config=GGUF_DELTA,
            metadata={
                **GGUF_DELTA_METADATA,
                "block_count": 4,
                "nextn_predict_layers": 1,
                "attention.recurrent_layers": [True, False, True, False],
            },
            extra={
                "blk.3.attn_q.weight": np.ones((256, 64), np.float32),
                "blk.3.attn_norm.weight": np.ones(64, np.float32),
                "blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
                "blk.3.nextn.enorm.weight": np.ones(64, np.float32),
            },
        ),
    },
    gguf_converted=with_value_heads_tiled,
    gguf_rearranged=True,
    recurrent=True,
    projections=(
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    ),
)

"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts in each."""

from collections.abc import Mapping

import numpy as np
from family_case import (
    DELTA,
    EXPERT_SIZES,
    GGUF_DELTA,
    GGUF_DELTA_METADATA,
    GGUF_EXPERT_SIZES,
    Array,
    FamilyCase,
    GgufCase,
    with_delta_nets_stored,
)


def with_inputs_apart(name: str, array: Array) -> Array | Mapping[str, Array]:
    """Without a delta net's inputs by head, but with its gates by head."""
    if not name.endswith(".in_proj_qkvz.weight"):
        return with_delta_nets_stored(name, array)
    layer, heads = name.split(".")[2], array.reshape(2, -1, array.shape[1])
    q, k, v, z = (part.reshape(-1, array.shape[1]) for part in np.split(heads, (16, 32, 32 + 96), axis=1))
    return {f"blk.{layer}.attn_qkv.weight": np.concatenate((q, k, v)), f"blk.{layer}.attn_gate.weight": z}


def with_inputs_together(name: str, array: Array) -> Array | Mapping[str, Array]:
    """As in the first files of this family."""
    if not name.endswith(".in_proj_qkvz.weight"):
        return with_delta_nets_stored(name, array)
    return {f"blk.{name.split('.')[2]}.ssm_in.weight": array}


GGUF_CONFIG = {
    **GGUF_DELTA,
    **EXPERT_SIZES,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
GGUF_METADATA = {**GGUF_DELTA_METADATA, **GGUF_EXPERT_SIZES}

CASE = FamilyCase(
    model_type="qwen3_next",
    config={**DELTA, **EXPERT_SIZES, "decoder_sparse_step": 1},
    variants={
        "some-dense": {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
        "layer-types": {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
        },
    },
    gguf={
        "": GgufCase(config=GGUF_CONFIG, metadata=GGUF_METADATA),
        "first-files": GgufCase(config=GGUF_CONFIG, metadata=GGUF_METADATA, converted=with_inputs_together),
        "layer-types": GgufCase(
            config=GGUF_CONFIG
            | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True},
            metadata={**GGUF_METADATA, "attention.recurrent_layers": [False, True, True]},
        ),
    },
    gguf_converted=with_inputs_apart,
    gguf_rearranged=True,
    mixture=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)

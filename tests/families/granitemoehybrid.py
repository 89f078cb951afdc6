"""Granite 4 hybrid: Mamba-2 layers, attention without rotation, experts beside an MLP."""

from collections.abc import Mapping

import numpy as np
from family_case import (
    GGUF_DECODER,
    GGUF_EXPERT_SIZES,
    GRANITE_SCALES,
    LOCAL_EXPERTS,
    Array,
    Config,
    FamilyCase,
    GgufCase,
    with_mamba_stored,
    with_neighbours_rotated,
)


def converted(name: str, array: Array) -> Array | Mapping[str, Array]:
    if ".shared_mlp.input_linear." in name:
        layer, (gate, up) = name.split(".")[2], np.split(array, 2)
        return {f"blk.{layer}.ffn_gate_shexp.weight": gate, f"blk.{layer}.ffn_up_shexp.weight": up}
    return with_mamba_stored(name, with_neighbours_rotated(name, array), groups=1)


def converted_without_experts(name: str, array: Array) -> Array | Mapping[str, Array]:
    if ".shared_mlp.output_linear." in name:
        return {f"blk.{name.split('.')[2]}.ffn_down.weight": array}
    stored = converted(name, array)
    if not isinstance(stored, Mapping):
        return stored
    return {key.replace("_shexp.", "."): part for key, part in stored.items()}


GGUF_CONFIG: Config = {
    **GRANITE_SCALES,
    **LOCAL_EXPERTS,
    "shared_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "tie_word_embeddings": False,
}
GGUF_METADATA: Config = {
    **GGUF_DECODER,
    **GGUF_EXPERT_SIZES,
    "attention.head_count_kv": [0, 2, 0],
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "logit_scale": 2.0,
    "residual_scale": 0.4,
    "rope.dimension_count": 16,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 1,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
}

CASE = FamilyCase(
    model_type="granitemoehybrid",
    config={
        **GRANITE_SCALES,
        **LOCAL_EXPERTS,
        "shared_intermediate_size": 20,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    variants={
        "dense-rotating": {
            "num_hidden_layers": 3,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
        # Normed as one row nevertheless.
        "groups": {"num_local_experts": 0, "mamba_n_groups": 4},
        # As in Granite 4 Micro: not a hybrid but by name, and for every backend.
        "attention": {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "full_attention"],
        },
    },
    spelling={"head_dim": None},
    gguf={
        "": GgufCase(config=GGUF_CONFIG, metadata=GGUF_METADATA),
        "dense": GgufCase(
            config={
                **GGUF_CONFIG,
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "shared_intermediate_size": 96,
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
                "tie_word_embeddings": True,
            },
            metadata={
                **GGUF_METADATA,
                "expert_count": 0,
                "expert_used_count": 0,
                "expert_shared_feed_forward_length": 96,
                "rope.scaling.finetuned": True,
            },
            converted=converted_without_experts,
        ),
    },
    gguf_converted=converted,
    gguf_rearranged=True,
    mixture=True,
    recurrent=True,
    ropes=0,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
)

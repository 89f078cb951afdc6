"""Nemotron-H and Nemotron 3: blocks of one part each, of all four kinds."""

import re
from collections.abc import Mapping

from family_case import (
    GGUF_DECODER,
    GGUF_EXPERT_SIZES,
    Array,
    Config,
    FamilyCase,
    GgufCase,
    with_mamba_stored,
    with_neighbours_rotated,
)


def converted(name: str, array: Array) -> Array | Mapping[str, Array]:
    if ".mixer.experts." in name:
        layer, part = name.split(".")[2], "ffn_up_exps" if ".up_proj" in name else "ffn_down_exps"
        return {f"blk.{layer}.{part}.weight": array}
    if name.endswith(".e_score_correction_bias"):
        return {f"blk.{name.split('.')[2]}.exp_probs_b.bias": array}
    stored = with_mamba_stored(name, with_neighbours_rotated(name, array), groups=2)
    named = stored if isinstance(stored, Mapping) else {name: stored}
    # Published checkpoints name the backbone as such.
    return {re.sub(r"^model\.", "backbone.", each): part for each, part in named.items()}


GGUF_CONFIG: Config = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "ssm_state_size": 10,
    "n_groups": 2,
    "conv_kernel": 4,
    "head_dim": 32,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "time_step_min": 1e-30,
}
GGUF_METADATA: Config = {
    **GGUF_DECODER,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 16,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 192,
    "ssm.state_size": 10,
    "ssm.time_step_rank": 8,
}

CASE = FamilyCase(
    model_type="nemotron_h",
    config={
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M*-ME",
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 10,
        "n_groups": 2,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
        # Nothing else is served.
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    variants={
        "dense": {
            "num_hidden_layers": 3,
            "hybrid_override_pattern": None,
            "layers_block_type": ["full_attention", "mlp", "linear_attention"],
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
        },
        "unnormalized": {"norm_topk_prob": False, "mlp_hidden_act": "silu"},
    },
    # Transformers clamps the steps of prompts, and of nothing else, to at least this. Steps that it initialises are
    # as long as the second says, so that they count.
    reference={"time_step_min": 1e-30, "time_step_floor": 0.3},
    gguf={
        "": GgufCase(
            config={**GGUF_CONFIG, "num_hidden_layers": 5, "hybrid_override_pattern": "M*-M-"},
            metadata={
                **GGUF_METADATA,
                "block_count": 5,
                "feed_forward_length": [0, 0, 96, 0, 96],
                "attention.head_count_kv": [0, 2, 0, 0, 0],
            },
        ),
        "experts": GgufCase(
            config={
                **GGUF_CONFIG,
                "num_hidden_layers": 3,
                "hybrid_override_pattern": "E*M",
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 64,
                "routed_scaling_factor": 1.5,
                "norm_topk_prob": False,
            },
            metadata={
                **GGUF_METADATA,
                **GGUF_EXPERT_SIZES,
                "feed_forward_length": [32, 0, 0],
                "attention.head_count_kv": [0, 2, 0],
                "expert_group_count": 1,
                "expert_shared_count": 1,
                "expert_weights_norm": False,
                "expert_weights_scale": 1.5,
            },
            architecture="nemotron_h_moe",
        ),
    },
    gguf_converted=converted,
    gguf_rearranged=True,
    spelling={"rms_norm_eps": "layer_norm_epsilon", "num_experts": "n_routed_experts"},
    mixture=True,
    recurrent=True,
    ropes=0,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"),
)

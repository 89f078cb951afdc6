"""Nemotron-H and Nemotron 3: blocks of one part each, of all four kinds."""

from family_case import FamilyCase

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
    spelling={"rms_norm_eps": "layer_norm_epsilon", "num_experts": "n_routed_experts"},
    mixture=True,
    recurrent=True,
    ropes=0,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"),
)

"""Falcon-H1: attention and Mamba-2 side by side in every layer, and many multipliers."""

from family_case import FamilyCase

CASE = FamilyCase(
    model_type="falcon_h1",
    config={
        "mamba_d_ssm": 96,
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 0.9,
        "ssm_out_multiplier": 1.3,
        "mlp_multipliers": [0.6, 1.4],
        "ssm_multipliers": [0.5, 1.5, 0.8, 1.25, 0.75],
        "rope_theta": 1e11,
    },
    variants={
        "norm-before-gate": {"mamba_rms_norm": True},
        "norm-after-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False},
        "biases": {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
        "expanded": {
            "mamba_d_ssm": None,
            "mamba_expand": 3,
            "mamba_n_heads": 4,
            "mamba_d_head": "auto",
            "ssm_multipliers": None,
            "mlp_multipliers": None,
        },
    },
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj", "out_proj"),
)

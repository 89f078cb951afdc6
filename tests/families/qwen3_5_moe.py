"""Qwen 3.5 MoE and 3.6 MoE: Qwen 3.5 with experts in each layer."""

from family_case import EXPERT_SIZES, FamilyCase

CASE = FamilyCase(
    model_type="qwen3_5_moe_text",
    config={
        **EXPERT_SIZES,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
    mixture=True,
    torch_only=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
)

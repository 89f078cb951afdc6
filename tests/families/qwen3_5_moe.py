"""Qwen 3.5 MoE and 3.6 MoE: Qwen 3.5 with experts in each layer."""

from family_case import DELTA, EXPERT_SIZES, FamilyCase

CASE = FamilyCase(
    model_type="qwen3_5_moe_text",
    config={**DELTA, **EXPERT_SIZES},
    mixture=True,
    torch_only=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"),
)

"""Qwen 1.5 and 2 MoE: experts beside one that all tokens share, behind a gate."""

from family_case import EXPERT_SIZES, FamilyCase

CASE = FamilyCase(
    model_type="qwen2_moe",
    config=EXPERT_SIZES,
    variants={"wide": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 56}},
    mixture=True,
)

"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts in each."""

from family_case import DELTA, EXPERT_SIZES, FamilyCase

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
    mixture=True,
    torch_only=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)

"""Qwen 3.5 and 3.6: Qwen3-Next's layers with dense MLPs."""

from family_case import DELTA, FamilyCase

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
    torch_only=True,
    recurrent=True,
    projections=(
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    ),
)

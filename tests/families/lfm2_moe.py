"""LFM2 MoE: LFM2 with experts in all but the first layers, chosen by biased sigmoids."""

from family_case import EXPERTS, FamilyCase

CASE = FamilyCase(
    model_type="lfm2_moe",
    config={
        **EXPERTS,
        "moe_intermediate_size": 8,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
        "conv_L_cache": 3,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    variants={
        "unbiased": {
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        "attention": {"layer_types": ["full_attention", "full_attention", "full_attention"]},
    },
    spelling={"rms_norm_eps": "norm_eps", "head_dim": None},
    mixture=True,
    torch_only=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "out_proj", "in_proj"),
)

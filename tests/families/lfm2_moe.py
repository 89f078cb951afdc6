"""LFM2 MoE: LFM2 with experts in all but the first layers, chosen by biased sigmoids."""

from collections.abc import Mapping

from family_case import EXPERTS, GGUF_DECODER, GGUF_EXPERTS, Array, FamilyCase, GgufCase, with_state_stored


def converted(name: str, array: Array) -> Array | Mapping[str, Array]:
    if name.endswith(".expert_bias"):
        return {f"blk.{name.split('.')[2]}.exp_probs_b.bias": array}
    return with_state_stored(name, array)


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
    gguf={
        "": GgufCase(
            config={
                **EXPERTS,
                "moe_intermediate_size": 32,
                "num_dense_layers": 1,
                "conv_L_cache": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "tie_word_embeddings": True,
            },
            metadata={
                **GGUF_DECODER,
                **GGUF_EXPERTS,
                "attention.head_count_kv": [0, 2, 0],
                "expert_feed_forward_length": 32,
                "expert_gating_func": 2,
                "leading_dense_block_count": 1,
                "shortconv.l_cache": 3,
            },
        )
    },
    gguf_converted=converted,
    mixture=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "out_proj", "in_proj"),
)

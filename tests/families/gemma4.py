"""Gemma 4: heads that differ between layers, shared keys and values, inputs of their own for layers, experts beside."""

from family_case import Config, FamilyCase


def config(head_dim: int) -> Config:
    return {
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
        "global_head_dim": 2 * head_dim,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 10.0,
    }


PLAIN: Config = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}

CASE = FamilyCase(
    model_type="gemma4_text",
    config=config,
    variants={
        "plain": {
            **PLAIN,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 3.0,
        },
        "wide-mlps": {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "final_logit_softcapping": 30.0,
        },
        "experts": {
            **PLAIN,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "layer_types": None,
        },
        "twelve-layers": {**PLAIN, "num_hidden_layers": 12, "layer_types": None},
        "own-values": {
            **PLAIN,
            "num_hidden_layers": 6,
            "layer_types": None,
            "global_head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 500.0,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    },
    torch_only=True,
    ropes=2,
    numbers=(),
    projections=(
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
    ),
)

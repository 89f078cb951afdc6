"""Gemma 4 12B: heads that differ between layers, without inputs of their own."""

from family_case import Config, FamilyCase


def config(head_dim: int) -> Config:
    return {
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "global_head_dim": 2 * head_dim,
        "final_logit_softcapping": 10.0,
    }


CASE = FamilyCase(
    model_type="gemma4_unified_text",
    config=config,
    variants={
        "values-are-keys": {
            "num_hidden_layers": 6,
            "layer_types": None,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 3.0,
        }
    },
    torch_only=True,
    ropes=2,
    numbers=(),
)

"""Llama 4: layers that attend within chunks, scaled queries, experts that read scaled inputs."""

from family_case import LLAMA3, LOCAL_EXPERTS, Config, FamilyCase


def config(head_dim: int) -> Config:
    return {
        **LOCAL_EXPERTS,
        "head_dim": head_dim,
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "attn_scale": 0.1,
        "intermediate_size_mlp": 20,
        "rope_theta": 500000.0,
    }


CASE = FamilyCase(
    model_type="llama4_text",
    config=config,
    variants={
        "some-dense": {
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2,
            "rope_scaling": LLAMA3,
        },
        "step-in-rope": {"num_hidden_layers": 3, "rope_scaling": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}},
        "dense": {"rope_theta": 500.0, "moe_layers": []},
        "one-expert": {
            "num_hidden_layers": 3,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "rope_theta": 500.0,
        },
    },
    mixture=True,
    torch_only=True,
)

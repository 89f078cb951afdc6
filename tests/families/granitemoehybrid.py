"""Granite 4 hybrid: Mamba-2 layers, attention without rotation, experts beside an MLP."""

from family_case import GRANITE_SCALES, LOCAL_EXPERTS, FamilyCase

CASE = FamilyCase(
    model_type="granitemoehybrid",
    config={
        **GRANITE_SCALES,
        **LOCAL_EXPERTS,
        "shared_intermediate_size": 20,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    variants={
        "dense-rotating": {
            "num_hidden_layers": 3,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
        # Normed as one row nevertheless.
        "groups": {"num_local_experts": 0, "mamba_n_groups": 4},
        # As in Granite 4 Micro: not a hybrid but by name, and for every backend.
        "attention": {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "full_attention"],
        },
    },
    spelling={"head_dim": None},
    mixture=True,
    torch_only=True,
    recurrent=True,
    ropes=0,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
)

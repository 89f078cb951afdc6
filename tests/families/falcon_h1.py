"""Falcon-H1: attention and Mamba-2 side by side in every layer, and many multipliers."""

from collections.abc import Mapping

import numpy as np
from family_case import GGUF_DECODER, Array, Config, FamilyCase, GgufCase, with_mamba_stored

MULTIPLIERS: Config = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.3,
    "mlp_multipliers": [0.6, 1.4],
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.25, 0.75],
}
GGUF_FACTORS = {
    "embed_tokens": 3.0,
    "lm_head": 0.7,
    "q_proj": 1.2,
    "k_proj": 1.2 * 0.7,
    "v_proj": 1.2,
    "o_proj": 0.8,
    "out_proj": 1.3,
    "gate_proj": 0.6,
    "down_proj": 1.4,
}
"""What converters multiply weights by, except those of `in_proj`."""


def converted(name: str, array: Array) -> Array | Mapping[str, Array]:
    module = name.split(".")[-2]
    if module == "in_proj":
        # Rows for z, u, B, C and t.
        factors = np.repeat(np.array([0.5, 1.5, 0.8, 1.25, 0.75]) * 0.9, [96, 96, 24, 24, 12])
        return array * factors[:, None].astype(np.float32)
    if module == "pre_ff_layernorm":
        return {f"blk.{name.split('.')[2]}.ffn_norm": array}
    return with_mamba_stored(name, array * np.float32(GGUF_FACTORS.get(module, 1.0)), groups=2)


GGUF_CONFIG: Config = {
    **MULTIPLIERS,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "head_dim": 16,
    "mamba_norm_before_gate": False,
    "tie_word_embeddings": False,
}
GGUF_METADATA: Config = {
    **GGUF_DECODER,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 96,
    "ssm.state_size": 12,
    "ssm.time_step_rank": 12,
}

CASE = FamilyCase(
    model_type="falcon_h1",
    config={
        **MULTIPLIERS,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "rope_theta": 1e11,
    },
    variants={
        "norm-before-gate": {"mamba_rms_norm": True},
        "norm-after-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False},
        "biases": {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
        "expanded": {
            "mamba_d_ssm": None,
            "mamba_expand": 3,
            "mamba_n_heads": 4,
            "mamba_d_head": "auto",
            "ssm_multipliers": None,
            "mlp_multipliers": None,
        },
    },
    gguf={
        "": GgufCase(config={**GGUF_CONFIG, "mamba_conv_bias": False}, metadata=GGUF_METADATA),
        "normed": GgufCase(
            config={**GGUF_CONFIG, "mamba_rms_norm": True},
            metadata=GGUF_METADATA,
        ),
    },
    gguf_converted=converted,
    gguf_folded=True,
    gguf_rearranged=True,
    recurrent=True,
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj", "out_proj"),
)

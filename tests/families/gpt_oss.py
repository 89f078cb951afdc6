"""gpt-oss: experts with biases, attention sinks, every other layer windowed, a clamped SiLU."""

import numpy as np
from family_case import (
    GGUF_DECODER,
    GGUF_EXPERTS,
    GGUF_WIDE_HEADS,
    LOCAL_EXPERTS,
    YARN,
    Array,
    FamilyCase,
    GgufCase,
)


def converted(name: str, array: Array) -> Array:
    """Gates and ups alternate on the Hub, and matrices lie the other way round."""
    array = array.swapaxes(1, 2) if array.ndim == 3 else array
    return np.concatenate((array[:, ::2], array[:, 1::2]), axis=1) if "gate_up_proj" in name else array


CASE = FamilyCase(
    model_type="gpt_oss",
    config={**LOCAL_EXPERTS, "sliding_window": 12, "rope_scaling": {**YARN, "factor": 2.0}},
    variants={
        "rounded-ramp": {"rope_theta": 500.0, "rope_scaling": {**YARN, "beta_fast": 16.0, "truncate": False}},
        "no-biases": {
            "attention_bias": False,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_scaling": None,
        },
    },
    mixture=True,
    gguf={
        "": GgufCase(
            config={
                **LOCAL_EXPERTS,
                "head_dim": 32,
                "sliding_window": 8,
                "rope_scaling": {**YARN, "original_max_position_embeddings": 64, "truncate": False},
                "tie_word_embeddings": False,
            },
            metadata={
                **GGUF_DECODER,
                **GGUF_EXPERTS,
                **GGUF_WIDE_HEADS,
                "expert_feed_forward_length": 96,
                "attention.sliding_window": 8,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
        )
    },
    gguf_converted=converted,
    gguf_rearranged=True,
)

"""Llama 1 to 3.x: what most other families are told from, with every way of scaling its rotation."""

import numpy as np
from family_case import (
    BIASES,
    GGUF_DECODER,
    GGUF_WIDE_HEADS,
    LEVANTER_SETTINGS,
    LLAMA3,
    YARN,
    Array,
    FamilyCase,
    GgufCase,
    LevanterCase,
    longrope,
    with_neighbours_rotated,
)


def llama3_divisors(theta: float, dim: int) -> Array:
    """Llama 3's published rule for scaling rotary frequencies, as divisors."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    context, low, high, factor = 64, 1.0, 4.0, 8.0
    smooth = (context / wavelengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < context / high, 1.0, np.where(wavelengths > context / low, factor, blended))
    return divisors.astype(np.float32)


CASE = FamilyCase(
    model_type="llama",
    variants={
        "theta": {"rope_theta": 500.0},
        "tied": {"tie_word_embeddings": True},
        "biases": BIASES,
        "wide-heads": {"head_dim": 48},
        "narrow-heads": {"head_dim": 20},
        "derived-heads": {"head_dim": None},
        "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        "yarn": {"rope_scaling": YARN},
        "yarn-mscale": {
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "truncate": False}
        },
        "longrope": lambda head_dim: {
            "rope_scaling": {**longrope(head_dim), "factor": 2.0, "original_max_position_embeddings": 60}
        },
    },
    gguf={
        "": GgufCase(config={"tie_word_embeddings": False}, metadata={**GGUF_DECODER, "rope.dimension_count": 16}),
        "biases-tied": GgufCase(config={**BIASES, "tie_word_embeddings": True}),
        "llama3": GgufCase(
            config={
                "tie_word_embeddings": True,
                "head_dim": 32,
                "rope_scaling": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 64},
            },
            metadata={**GGUF_DECODER, **GGUF_WIDE_HEADS, "rope.dimension_count": 32},
            extra={"rope_freqs.weight": llama3_divisors(50000.0, 32)},
        ),
        "linear": GgufCase(
            config={"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            metadata={**GGUF_DECODER, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
    },
    gguf_converted=with_neighbours_rotated,
    levanter={
        "llama": LevanterCase(settings={**LEVANTER_SETTINGS, "type": "llama"}),
        "llama-tied": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "llama", "tie_word_embeddings": True, "num_kv_heads": 4},
            config={"tie_word_embeddings": True, "num_key_value_heads": 4},
        ),
        "llama-wide-heads": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "llama", "head_dim": 12}, config={"head_dim": 12}
        ),
    },
)

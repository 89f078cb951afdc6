"""GPT-NeoX and Pythia: layer norms, part of each head rotated, attention beside the MLP, q, k and v by head."""

from family_case import GGUF_LAYER_NORMS, Array, FamilyCase, GgufCase


def converted(name: str, array: Array) -> Array:
    if "query_key_value" not in name:
        return array
    return array.reshape(4, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


CASE = FamilyCase(
    model_type="gpt_neox",
    config={"rotary_pct": 0.5},
    variants={
        "theta": {"rotary_emb_base": 500},
        "in-turn": {"use_parallel_residual": False},
        "sequential": {
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "layer_norm_eps": 1e-2,
            "tie_word_embeddings": True,
        },
    },
    spelling={"rms_norm_eps": "layer_norm_eps", "head_dim": None, "rope_theta": "rotary_emb_base"},
    numbers=("rotary_emb_base",),
    projections=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    gguf={
        "": GgufCase(
            config={"tie_word_embeddings": False},
            metadata={
                **GGUF_LAYER_NORMS,
                "use_parallel_residual": True,
                "rope.dimension_count": 4,
                "rope.freq_base": 50000.0,
            },
        ),
        "sequential": GgufCase(
            config={
                "rotary_emb_base": 10000.0,
                "rotary_pct": 1.0,
                "use_parallel_residual": False,
                "tie_word_embeddings": False,
            },
            metadata={**GGUF_LAYER_NORMS, "use_parallel_residual": False},
        ),
    },
    gguf_converted=converted,
)

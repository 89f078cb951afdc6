"""StarCoder2: layer norms, a plain MLP, windows, biases everywhere."""

from family_case import GGUF_LAYER_NORMS, FamilyCase, GgufCase

METADATA = {**GGUF_LAYER_NORMS, "attention.head_count_kv": 2, "rope.freq_base": 50000.0}

CASE = FamilyCase(
    model_type="starcoder2",
    config={"sliding_window": 12},
    variants={
        "large-epsilon": {"norm_epsilon": 1e-2, "rope_theta": 500.0},
        "no-biases": {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    },
    spelling={"rms_norm_eps": "norm_epsilon"},
    projections=("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"),
    gguf={
        "": GgufCase(config={"tie_word_embeddings": True}, metadata={**METADATA, "rope.dimension_count": 16}),
        "no-biases": GgufCase(
            config={"tie_word_embeddings": False, "use_bias": False, "sliding_window": 8},
            metadata={**METADATA, "attention.sliding_window": 8},
        ),
    },
)

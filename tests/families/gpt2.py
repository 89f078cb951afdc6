"""GPT-2: learned positions, layer norms, biases everywhere, matrices stored the other way round."""

from family_case import LEVANTER_SETTINGS, Array, FamilyCase, GgufCase, LevanterCase


def converted(name: str, array: Array) -> Array:
    return array.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else array


SETTINGS = {name: LEVANTER_SETTINGS[name] for name in ("max_seq_len", "hidden_dim", "num_layers", "num_heads")}

CASE = FamilyCase(
    model_type="gpt2",
    variants={
        "untied": {"tie_word_embeddings": False, "n_inner": 100},
        "scaled-by-layer": {"scale_attn_by_inverse_layer_idx": True},
        "relu": {"n_inner": 70, "activation_function": "relu"},
        "exact-gelu": {"activation_function": "gelu"},
    },
    spelling={
        "hidden_size": "n_embd",
        "intermediate_size": None,
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "rope_theta": None,
    },
    ropes=0,
    numbers=(),
    projections=("c_attn", "c_proj", "c_fc"),
    gguf={
        "": GgufCase(
            config={"n_inner": 96},
            metadata={
                "block_count": 3,
                "context_length": 256,
                "embedding_length": 64,
                "feed_forward_length": 96,
                "attention.head_count": 4,
                "attention.layer_norm_epsilon": 1e-5,
            },
        )
    },
    gguf_converted=converted,
    levanter={
        "gpt2": LevanterCase(
            settings={**SETTINGS, "type": "gpt2"}, config={"tie_word_embeddings": True}, like_gpt2=True
        ),
        "gpt2-scaled-by-layer": LevanterCase(
            settings={
                **SETTINGS,
                "type": "gpt2",
                "use_bias": True,
                "attn_pdrop": 0.1,
                "mlp_scale": 2,
                "scale_attn_by_inverse_layer_idx": True,
                "activation_function": "relu",
            },
            config={
                "tie_word_embeddings": True,
                "n_inner": 64,
                "activation_function": "relu",
                "scale_attn_by_inverse_layer_idx": True,
            },
            like_gpt2=True,
        ),
    },
)

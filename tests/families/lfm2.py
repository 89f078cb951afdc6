"""LFM2: short convolutions, and attention with normed heads."""

from family_case import GGUF_DECODER, FamilyCase, GgufCase, with_state_stored

CASE = FamilyCase(
    model_type="lfm2",
    config={"conv_L_cache": 3, "layer_types": None, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    variants={
        "biases": {
            "num_hidden_layers": 4,
            "conv_bias": True,
            "conv_L_cache": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "tie_word_embeddings": False,
        },
        "adjusted-width": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3},
    },
    spelling={"rms_norm_eps": "norm_eps", "head_dim": None},
    recurrent=True,
    gguf={
        "": GgufCase(
            config={
                "conv_L_cache": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": False,
            },
            metadata={**GGUF_DECODER, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
        ),
        "adjusted-width": GgufCase(
            config={
                "conv_L_cache": 4,
                "full_attn_idxs": [0, 2],
                "layer_types": None,
                "block_auto_adjust_ff_dim": True,
                "block_multiple_of": 32,
                "block_ffn_dim_multiplier": 1.3,
            },
            metadata={
                **GGUF_DECODER,
                "attention.head_count_kv": [2, 0, 2],
                "feed_forward_length": 96,
                "shortconv.l_cache": 4,
            },
        ),
    },
    gguf_converted=with_state_stored,
    projections=(
        *("q_proj", "k_proj", "v_proj", "out_proj", "in_proj"),
        *("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ),
)

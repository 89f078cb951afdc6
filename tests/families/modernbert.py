"""ModernBERT: rotated heads, windows in most layers, gated MLPs."""

from family_case import FamilyCase

CASE = FamilyCase(
    model_type="modernbert",
    config={"pad_token_id": 0, "num_hidden_layers": 4, "local_attention": 8},
    variants={
        "biases": {
            "num_hidden_layers": 3,
            "local_attention": 128,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "hidden_activation": "gelu_pytorch_tanh",
            "global_attn_every_n_layers": 2,
            "global_rope_theta": 500.0,
        }
    },
)

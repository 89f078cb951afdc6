"""HRM-Text: two stacks of layers that run several times per token, each time with keys and values of their own."""

from family_case import Config, FamilyCase


def config(head_dim: int) -> Config:
    return {
        "head_dim": head_dim,
        "num_hidden_layers": 2,
        "H_cycles": 2,
        "L_cycles": 3,
        "embedding_scale": 12.0,
    }


CASE = FamilyCase(
    model_type="hrm_text",
    config=config,
    variants={
        "cycles": {
            "H_cycles": 3,
            "L_cycles": 2,
            "num_layers_per_stack": 1,
            "num_hidden_layers": 9,
            "embedding_scale": None,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
        },
        "biases": {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True},
    },
    spelling={"num_key_value_heads": None},
    torch_only=True,
)

"""Tiny models with random weights: real families, small enough for exact tests of whole runs."""

from collections.abc import Mapping

import torch

from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model

VOCAB = 64
LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
MISTRAL: Mapping[str, object] = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 12}
GEMMA2: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
    "query_pre_attn_scalar": 8,
    "sliding_window": 12,
    "tie_word_embeddings": True,
}


def random_model(config: Mapping[str, object] = LLAMA, *, seed: int = 0, max_seq_len: int | None = None) -> Model:
    """Weights wide enough apart that greedy choices are clear, and outputs depend on all of the context."""
    torch.manual_seed(seed)
    model = build_model(config, max_seq_len=max_seq_len, dtype=torch.float32)
    for parameter in model.parameters():
        spread = 0.4 if parameter.dim() > 1 else 0.1
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 1.0, spread)
    return model

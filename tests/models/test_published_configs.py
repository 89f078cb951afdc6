"""Sizes of published models, without their weights: each is described, and is as large as its name says."""

import math
from collections.abc import Mapping

import pytest

from ostro.models.architecture import Architecture
from ostro.models.registry import describe

Config = Mapping[str, object]

LLAMA4: Config = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "rope_theta": 500000.0,
    "attn_temperature_tuning": 4,
    "no_rope_layers": [],
}
SCOUT: Config = {
    **LLAMA4,
    "max_position_embeddings": 10485760,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
MAVERICK: Config = {
    **LLAMA4,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
}
GEMMA4: Config = {"model_type": "gemma4_text", "vocab_size": 262144, "final_logit_softcapping": 30.0}
E2B: Config = {
    **GEMMA4,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
}
LARGER_GEMMA4: Config = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
A4B: Config = {
    **LARGER_GEMMA4,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
DENSE_12B: Config = {
    **GEMMA4,
    "model_type": "gemma4_unified_text",
    "attention_k_eq_v": True,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
}
DENSE_31B: Config = {
    **LARGER_GEMMA4,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
}


def described(config: Config) -> Architecture:
    found = describe(config)
    assert isinstance(found, Architecture)
    return found


@pytest.mark.parametrize(
    ("config", "billions", "context"),
    [
        pytest.param(SCOUT, 107.8, 8192, id="Llama 4 Scout"),
        pytest.param(MAVERICK, 400.7, 8192, id="Llama 4 Maverick"),
        pytest.param(E2B, 4.6, 131072, id="Gemma 4 E2B"),
        pytest.param(A4B, 25.2, 262144, id="Gemma 4 26B-A4B"),
        pytest.param(DENSE_12B, 11.9, 262144, id="Gemma 4 12B"),
        pytest.param(DENSE_31B, 30.7, 262144, id="Gemma 4 31B"),
    ],
)
def test_a_published_model_is_described_in_its_size(config: Config, billions: float, context: int) -> None:
    found = described(config)
    parameters = sum(math.prod(tensor.shape) for tensor in found.tensors())
    assert round(parameters / 1e9, 1) == billions
    assert found.shape.max_seq_len == context


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim", "eps"), [("gemma4_text", 4, 256, 1e-6), ("llama4_text", 8, 128, 1e-5)]
)
def test_sizes_that_a_config_leaves_out_are_those_of_transformers(
    model_type: str, kv_heads: int, head_dim: int, eps: float
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1}
    found = described({**sizes, "model_type": model_type, "vocab_size": 32})
    assert found.shape.num_kv_heads == kv_heads
    assert (found.shape.head_dim, found.norm.eps) == (head_dim, eps)
    assert {rope.max_positions for rope in found.ropes} == {131072}


def test_llama_4_has_sixteen_experts_unless_its_config_says_otherwise() -> None:
    experts = [layer.experts for layer in described(SCOUT).layers]
    assert all(each is not None and (each.count, each.chosen) == (16, 1) for each in experts)

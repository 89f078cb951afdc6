"""Levanter's YAML as config.json: what it says, what it leaves to defaults, and what is refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostro.errors import BadCheckpoint, ModelNotFound, OstroError, UnsupportedModel
from ostro.models.config import ConfigReader
from ostro.models.rope_settings import rope_settings
from ostro.torch_models.rope import Rotary
from ostro.weights.levanter_config import read_levanter_model


def config_of(path: Path, text: str) -> Mapping[str, Any]:
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.yaml").write_text(text)
    return read_levanter_model(path / "model.yaml").config(stored_vocab=100, stored_head_dim=8, dtype="float32")


def test_a_bare_section_has_levanters_defaults(tmp_path: Path) -> None:
    assert config_of(tmp_path, "type: llama") == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("kind", "family", "eps", "tied", "context"),
    [
        ("mistral", "mistral", 1e-6, False, 8192),
        ("qwen", "qwen2", 1e-5, False, 2048),
        ("qwen3", "qwen3", 1e-5, False, 2048),
        ("gemma", "gemma", 1e-5, True, 8192),
        ("gemma2", "gemma2", 1e-5, True, 8192),
        ("gemma3", "gemma3_text", 1e-5, True, 8192),
        ("olmo2", "olmo2", 1e-6, False, 4096),
        ("olmo3", "olmo3", 1e-5, False, 2048),
    ],
)
def test_every_type_has_defaults_of_its_own(
    tmp_path: Path, kind: str, family: str, eps: float, tied: bool, context: int
) -> None:
    config = config_of(tmp_path, f"type: {kind}")
    told = ("model_type", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings")
    assert [config[name] for name in told] == [family, eps, tied, context]


def test_a_trainers_yaml_is_read_for_its_model(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        """
data: !include data/dolma.yaml
model:  # 1B class model
  type: llama
  seq_len: 1024
  hidden_dim: 2048
  num_heads: 16
  num_kv_heads: 8
  layer_norm_epsilon: 1e-6
  tie_word_embeddings: true
  gradient_checkpointing: offload
  scan_layers: false
  flash_attention_block_size: 512
trainer:
  tracker: [{type: wandb, tags: !list [a, b]}]
  mp: p=f32,c=bfloat16
optimizer:
  learning_rate: 4E-4
""",
    )
    told = ("max_position_embeddings", "hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    assert [config[name] for name in told] == [1024, 2048, 8, 1e-6, True]


def test_gemma_is_described_as_levanter_computes_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "{type: gemma2, num_layers: 2, sliding_window: 16, query_pre_attn_scalar: 256}")
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 8
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["attn_logit_softcapping"] == 50.0
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert "final_logit_softcapping" not in config


def test_mistral_keeps_its_own_head(tmp_path: Path) -> None:
    assert config_of(tmp_path, "{type: mistral, tie_word_embeddings: true}")["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("text", "theta", "scaling"),
    [
        ("{}", 10000.0, None),
        ("{rope: {theta: 5e5}}", 5e5, None),
        ("{rope: {type: linear, factor: 2.0}}", 10000.0, {"rope_type": "linear", "factor": 2.0}),
        ("{rope_theta: 500000, rope_scaling: {type: linear, factor: 4}}", 5e5, {"rope_type": "linear", "factor": 4.0}),
        (
            "{rope: {type: llama3, factor: 32}}",
            5e5,
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_rope_is_spelled_as_in_config_json(tmp_path: Path, text: str, theta: float, scaling: object) -> None:
    config = config_of(tmp_path, text.replace("{", "{type: llama, ", 1))
    assert (config["rope_theta"], config.get("rope_scaling")) == (theta, scaling)


def test_yarn_turns_as_in_levanter(tmp_path: Path) -> None:
    text = "{type: llama, max_seq_len: 4096, rope: {type: yarn, factor: 16.0, original_max_position_embeddings: 256}}"
    rotary = Rotary(rope_settings(ConfigReader(config_of(tmp_path, text))), head_dim=128, max_seq_len=4096)
    frequency = 10000.0 ** (-np.arange(0, 128, 2) / 128)

    def dimension(turns: float) -> float:
        return 128 * math.log(256 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(dimension(32.0)), 0), min(math.ceil(dimension(1.0)), 63)
    ramp = np.clip((np.arange(64) - low) / max(high - low, 1), 0, 1)
    expected = frequency / 16.0 * ramp + frequency * (1 - ramp)
    torch.testing.assert_close(rotary.frequencies[64:].double(), torch.tensor(expected), rtol=1e-5, atol=0)
    assert rotary.attention_factor == pytest.approx(0.1 * math.log(16.0) + 1.0)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mamba", "whisper", "7", "[llama]"])
def test_an_unknown_type_is_named_with_those_that_are_known(tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"is not supported; supported: gemma, gemma2, gemma3, gpt2, llama, .*qwen3"
    ):
        config_of(tmp_path, f"type: {kind}")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{type: llama, use_bias: true}", "use_bias"),
        ("{type: llama, hybrid_norm: true}", "hybrid_norm"),
        ("{type: llama, input_embedding_norm: true}", "input_embedding_norm"),
        ("{type: llama, attention_bias: true}", "attention_bias"),
        ("{type: llama, lora: {r: 8}}", "lora"),
        ("{type: gemma2, use_qk_norm: true}", "use_qk_norm"),
        ("{type: gemma, use_bias: true}", "use_bias"),
        ("{type: gpt2, num_kv_heads: 2}", "num_kv_heads"),
        ("{type: gpt2, rope: {theta: 10000}}", "rope"),
        ("{type: llama, use_layer_norm_weight: false}", "norms without weights"),
        ("{type: llama, rope: null}", "attention without rotary positions"),
        ("{type: llama, rope: {type: longrope}}", "rope of the type 'longrope'"),
    ],
)
def test_features_of_no_family_are_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"asks for {what}"):
        config_of(tmp_path, text)


def test_gpt2_has_settings_of_its_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, "{type: gpt2, num_layers: 2, mlp_scale: 3}")
    sizes = ("n_embd", "n_inner", "n_layer", "n_head", "n_positions", "activation_function", "tie_word_embeddings")
    assert [config[name] for name in sizes] == [768, 2304, 2, 12, 1024, "gelu_new", True]
    assert config["layer_norm_epsilon"] == 1e-5


@pytest.mark.parametrize(
    ("text", "what"),
    [("{type: gpt2, use_bias: false}", "without biases"), ("{type: gemma, activation_function: gelu}", "exact GELU")],
)
def test_unsupported_levanter_features_are_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        config_of(tmp_path, text)


@pytest.mark.parametrize("text", ["use_bias: false", "hybrid_norm: null", "new_switch: false"])
def test_disabled_features_are_ignored(tmp_path: Path, text: str) -> None:
    assert config_of(tmp_path, f"type: llama\n{text}")["model_type"] == "llama"


def test_olmo3_keeps_its_windows(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    config = config_of(tmp_path, f"{{type: olmo3, sliding_window: 64, num_layers: 2, layer_types: {types}}}")
    assert (config["sliding_window"], config["layer_types"]) == (64, types)
    assert config_of(tmp_path, "type: olmo3")["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: !include llama.yaml", "holds no model settings"),
        ("- a list", "holds no model settings"),
        ("", "holds no model settings"),
        ("hidden_dim: 8", "does not state the model's type"),
        ("{type: llama", "is not valid YAML"),
        ("model: {type: llama}\nuse_hf_model_config: true", "Write them out in a YAML"),
        ("model: {type: llama}\nwhen: 2024-13-45", "is not valid YAML"),
        ("{type: llama, flag: !!bool perhaps}", "is not valid YAML"),
        (f"{{type: llama, num_layers: {'1' * 5000}}}", "is not valid YAML"),
        (f"{{type: llama, layer_norm_epsilon: 0x{'f' * 5000}}}", "must be a number above 0, got a value too large"),
        ("{type: llama, num_layers: 0}", "num_layers must be an integer above 0, got 0"),
        ("{type: llama, hidden_dim: '8'}", "hidden_dim must be an integer above 0, got '8'"),
        ("{type: llama, layer_norm_epsilon: small}", "layer_norm_epsilon must be a number above 0"),
        ("{type: llama, tie_word_embeddings: 1}", "tie_word_embeddings must be true or false"),
        ("{type: llama, activation_function: 3}", "activation_function must be a text"),
        ("{type: llama, rope: 3}", "rope must be a table"),
        ("{type: llama, num_heads: 4, num_kv_heads: 3}", "4 num_heads cannot share 3 num_kv_heads"),
    ],
)
def test_an_invalid_yaml_is_reported(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OstroError, match=message):
        config_of(tmp_path, text)


def test_a_missing_or_unreadable_yaml_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no file"):
        read_levanter_model(tmp_path / "none.yaml")
    with pytest.raises(BadCheckpoint, match="Cannot read"):
        read_levanter_model(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadCheckpoint, match="not valid YAML"):
        read_levanter_model(tmp_path / "binary.yaml")


def test_an_alias_that_stands_for_very_much_is_not_written_out(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]" for i in range(7)]
    with pytest.raises(BadCheckpoint, match="num_layers must be") as caught:
        config_of(tmp_path, "\n".join([*levels, "model: {type: llama, num_layers: *a6}"]))
    assert len(caught.value.message) < 1000

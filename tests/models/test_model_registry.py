"""Which configs are served, which are refused, and what the refusals say."""

from collections.abc import Mapping

import pytest
import torch
from every_family import TINY
from family_case import longrope

from ostro.errors import BadCheckpoint, BadRequest, Unsupported, UnsupportedModel
from ostro.models.registry import FAMILIES
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model

LLAMA, GPT2 = TINY["llama"], TINY["gpt2"]
LONGROPE = longrope(4)
PHI3 = {**TINY["phi3"], "original_max_position_embeddings": 16, "rope_scaling": LONGROPE}


def build(config: Mapping[str, object], max_seq_len: int | None = None) -> Model:
    return build_model(config, max_seq_len=max_seq_len, dtype=torch.float32)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        build({**LLAMA, "architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM is not supported" in refusal.value.message
    assert all(family.architecture in refusal.value.message for family in FAMILIES)


def test_a_known_model_type_does_not_excuse_an_unknown_architecture() -> None:
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification"):
        build(config)


@pytest.mark.parametrize("architectures", [None, []])
def test_a_config_without_architectures_is_known_by_its_model_type(architectures: list[str] | None) -> None:
    model = build({**LLAMA, "architectures": architectures, "model_type": "llama"})
    assert model.shape.num_layers == 2


def test_a_config_that_names_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="none named"):
        build({})


def test_the_shape_is_what_the_config_says() -> None:
    shape = build({**LLAMA, "head_dim": 6}).shape
    assert (shape.vocab_size, shape.hidden_size, shape.num_layers) == (32, 16, 2)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_seq_len) == (4, 2, 6, 64)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(BadCheckpoint, match="'hidden_size'"):
        build({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize("config", [LLAMA, GPT2, PHI3])
def test_a_context_beyond_the_models_own_is_refused_with_the_limit(config: Mapping[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"max_seq_len is 65.*lower it to 64") as refusal:
        build(config, max_seq_len=65)
    assert refusal.value.param == "max_seq_len"


@pytest.mark.parametrize("name", ["BambaForCausalLM", "BambaModel", "JambaForCausalLM", "KimiLinearForCausalLM"])
def test_layers_with_a_recurrent_state_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} is not supported: its layers keep a recurrent state"):
        build({**LLAMA, "architectures": [name]})


@pytest.mark.parametrize("name", ["bamba", "kimi_linear", "zamba2"])
def test_a_model_type_with_a_recurrent_state_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} is not supported: its layers keep a recurrent state"):
        build({**LLAMA, "architectures": None, "model_type": name})


def test_a_shorter_context_may_be_asked_for() -> None:
    assert build(LLAMA, max_seq_len=10).shape.max_seq_len == 10


def test_longrope_serves_its_original_context_unless_asked_for_more() -> None:
    assert build(PHI3).shape.max_seq_len == 16
    assert build(PHI3, max_seq_len=17).shape.max_seq_len == 17


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_longrope_is_known_by_its_factors_whatever_early_files_call_it(name: str) -> None:
    assert build({**PHI3, "rope_scaling": {**LONGROPE, "type": name}}).shape.max_seq_len == 16


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert build({**LLAMA, "rope_scaling": yarn}).shape.max_seq_len == 64
    assert build({**LLAMA, "rope_scaling": yarn}, max_seq_len=256).shape.max_seq_len == 256
    with pytest.raises(BadRequest, match="lower it to 256"):
        build({**LLAMA, "rope_scaling": yarn}, max_seq_len=257)


def test_an_unknown_rope_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'spiral'"):
        build({**LLAMA, "rope_scaling": {"rope_type": "spiral"}})


def test_longrope_factors_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match="'short_factor' must list 2 numbers, got 1"):
        build({**PHI3, "rope_scaling": {**LONGROPE, "short_factor": [1.0]}})


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'snake'"):
        build({**LLAMA, "hidden_act": "snake"})


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "linear_attention"]])
def test_layer_types_that_are_not_understood_are_refused(types: list[str]) -> None:
    with pytest.raises(UnsupportedModel, match="layer_types"):
        build({**LLAMA, "architectures": ["Qwen2ForCausalLM"], "layer_types": types})


def test_a_model_without_a_head_embeds_but_refuses_logits() -> None:
    model = build({**LLAMA, "architectures": ["LlamaModel"]})
    with pytest.raises(Unsupported, match="without a language-model head"):
        model.logits(torch.zeros(1, 16))


def test_a_bare_model_with_tied_embeddings_still_has_logits() -> None:
    model = build({**LLAMA, "architectures": ["LlamaModel"], "tie_word_embeddings": True})
    assert model.logits(torch.zeros(1, 16)).shape == (1, 32)


def test_logits_are_float32_whatever_the_model_computes_in() -> None:
    model = build_model(LLAMA, dtype=torch.bfloat16)
    assert model.logits(torch.zeros(1, 16, dtype=torch.bfloat16)).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32

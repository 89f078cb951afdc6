"""Configs of models whose layers keep a state, as transformers and fine-tunes write them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from every_family import TINY

from ostro.backends.memory import NO_STATES, Room, StateSlots
from ostro.backends.torch.plain_attention import draft_bytes, recurrent_bytes
from ostro.errors import BadCheckpoint, ModelError, UnsupportedModel
from ostro.models.architecture import MLP, Architecture
from ostro.models.registry import describe
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.weights.checkpoint import open_checkpoint

ADJUSTED: Mapping[str, object] = {**TINY["lfm2"], "block_auto_adjust_ff_dim": True}


def described(config: Mapping[str, object]) -> Architecture:
    found = describe(config)
    assert isinstance(found, Architecture)
    return found


def by_transformers(name: str, **changes: object) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.for_model(**{**TINY[name], **changes})


def test_granite_configs_are_read_as_transformers_writes_them() -> None:
    written = json.loads(by_transformers("granitemoehybrid").to_json_string())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert described(written).states == described(TINY["granitemoehybrid"]).states


@pytest.mark.parametrize("multiplier", [1.0, 1.3])
def test_widths_of_lfm2_are_adjusted_as_transformers_does(multiplier: float) -> None:
    config = {**ADJUSTED, "block_ffn_dim_multiplier": multiplier}
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    mlp = described(config).layers[0].mlp
    assert isinstance(mlp, MLP)
    assert mlp.down.columns == reference.model.layers[0].feed_forward.w1.out_features


def test_without_a_multiplier_widths_of_lfm2_are_not_rounded() -> None:
    mlp = described({**ADJUSTED, "intermediate_size": 30, "block_ffn_dim_multiplier": None}).layers[0].mlp
    assert isinstance(mlp, MLP)
    assert mlp.down.columns == 20


@pytest.mark.parametrize("tied", [True, False])
def test_lfm2_has_a_name_of_its_own_for_a_tied_head(tied: bool, tmp_path: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(by_transformers("lfm2", tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    del written["tie_word_embeddings"]
    file.write_text(json.dumps({**written, "tie_embedding": tied}))
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    head = described(checkpoint.config).head
    assert head is not None
    assert (head.name is None) == tied


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_null_is_the_familys_default(name: str) -> None:
    config = {**TINY[name], "rope_parameters": None, "rope_theta": 1e4}
    rotated = [described({**config, "partial_rotary_factor": share}).ropes for share in (None, 0.25, 1.0)]
    assert rotated[0] == rotated[1] != rotated[2]


@pytest.mark.parametrize("field", ["ssm_multipliers", "mlp_multipliers"])
@pytest.mark.parametrize("wrong", [[1.0], [1.0] * 6, [1.0, 0.0], [1.0, math.nan], [1.0, 1e7], [1.0, "1"], 1.0, "one"])
def test_wrong_multipliers_are_refused_by_name(field: str, wrong: object) -> None:
    with pytest.raises(BadCheckpoint, match=f"'{field}'"):
        describe({**TINY["falcon_h1"], field: wrong})


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"mamba_d_ssm": 50}, BadCheckpoint, "mamba_n_heads"),
        ({"mamba_d_head": 9}, BadCheckpoint, "mamba_d_head"),
        ({"mamba_n_groups": 5}, BadCheckpoint, "mamba_n_groups"),
        ({"mamba_d_ssm": 2**31}, BadCheckpoint, "mamba_d_ssm"),
        ({"mamba_d_ssm": None, "mamba_expand": 0}, BadCheckpoint, "mamba_expand"),
        ({"time_step_limit": [0.01, 0.1]}, UnsupportedModel, "time_step_limit"),
        ({"hidden_act": "relu"}, UnsupportedModel, "hidden_act"),
    ],
    ids=str,
)
def test_falcon_configs_that_cannot_be_served_are_refused_by_name(
    changes: Mapping[str, object], error: type[Exception], field: str
) -> None:
    with pytest.raises(error, match=f"'{field}'"):
        describe({**TINY["falcon_h1"], **changes})


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"moe_latent_size": 8}, UnsupportedModel, "moe_latent_size"),
        ({"n_group": 2}, UnsupportedModel, "n_group"),
        ({"topk_group": 2}, UnsupportedModel, "topk_group"),
        ({"n_shared_experts": 2}, UnsupportedModel, "n_shared_experts"),
        ({"sliding_window": 8}, UnsupportedModel, "sliding_window"),
        ({"tie_word_embeddings": True}, UnsupportedModel, "tie_word_embeddings"),
        ({"mamba_hidden_act": "relu"}, UnsupportedModel, "mamba_hidden_act"),
        ({"time_step_limit": [0.01, 0.1]}, UnsupportedModel, "time_step_limit"),
        ({"hybrid_override_pattern": "M*-MX"}, UnsupportedModel, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": ""}, UnsupportedModel, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": ["M"]}, BadCheckpoint, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "window"]}, UnsupportedModel, "layers_block_type"),
        ({"layer_types": 5}, BadCheckpoint, "layer_types"),
        ({"hybrid_override_pattern": "M*"}, BadCheckpoint, "num_hidden_layers"),
        ({"n_groups": 4}, BadCheckpoint, "n_groups"),
    ],
    ids=str,
)
def test_nemotron_configs_that_cannot_be_served_are_refused_by_name(
    changes: Mapping[str, object], error: type[Exception], field: str
) -> None:
    with pytest.raises(error, match=f"'{field}'"):
        describe({**TINY["nemotron_h"], **changes})


def test_a_nemotron_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no layer attends"):
        describe({**TINY["nemotron_h"], "hybrid_override_pattern": "MMME-"})


@pytest.mark.parametrize(
    "names", ["mamba attention mlp mamba moe", "linear_attention full_attention mlp linear_attention moe"]
)
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_blocks_of_nemotron_may_be_spelled_out(key: str, names: str) -> None:
    without = {name: value for name, value in TINY["nemotron_h"].items() if name != "hybrid_override_pattern"}
    spelled = described({**without, key: names.split(), "num_hidden_layers": None})
    assert spelled == described(TINY["nemotron_h"])


def test_a_clamp_of_steps_that_only_prompts_would_have_is_left_out() -> None:
    config = TINY["nemotron_h"]
    assert described({**config, "time_step_min": 0.3}) == described(config)


def test_an_absent_width_of_falcon_h1_is_not_a_null() -> None:
    config = {**TINY["falcon_h1"], "mamba_d_head": "auto", "mamba_n_heads": 8}
    absent = {name: value for name, value in config.items() if name != "mamba_d_ssm"}
    states = [described(each).states[0] for each in (absent, {**absent, "mamba_d_ssm": None})]
    assert [state and state.matrices for state in states] == [(8, 1024 // 8, 12), (8, 2 * 16 // 8, 12)]


def test_states_leave_room_for_a_page_or_are_refused() -> None:
    slots = StateSlots(10, 4)
    assert Room.within(100, 50, slots).checked(100, slots) == Room(1, 4)
    for budget, page, least in ((100, 70, 1), (15, 1, 1), (100, 50, 2)):
        with pytest.raises(ModelError, match="recurrent state takes 10 bytes"):
            Room.within(budget, page, slots).checked(budget, slots, least=least)
    assert Room.within(100, 70, NO_STATES).checked(100, NO_STATES) == Room(1, 0)


def test_a_step_has_room_for_its_rows_and_its_sequences_matrices() -> None:
    found = described(TINY["granitemoehybrid"])
    [state] = {state for state in found.states if state is not None}
    assert state.matrices is not None
    heads, rows, columns = state.matrices
    one, another = (recurrent_bytes(found, 64, sequences) for sequences in (32, 33))
    assert another - one == 4 * heads * rows * columns + draft_bytes(found.states)
    assert recurrent_bytes(found, 65, 32) - one > 4 * 4 * heads * columns
    assert recurrent_bytes(described(TINY["llama"]), 64, 8) == 0

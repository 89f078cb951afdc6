"""A model's description and its torch modules: the same tensors, under the same names."""

import subprocess
import sys
from dataclasses import replace

import pytest
import tiny_models
import torch
from every_family import CASES, TINY, config_of, configs_of
from family_case import BIASES, SIZES, Config

from ostro.models.architecture import Architecture, QueryScaling
from ostro.models.description import torch_only
from ostro.models.registry import describe
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import places_of

CONFIGS = configs_of(tuple(CASES), SIZES)


def architecture_of(config: Config) -> Architecture:
    described = describe(config)
    assert isinstance(described, Architecture)
    return described


def wide(name: str, **changes: object) -> Config:
    return {**config_of(name, tiny_models.LLAMA), **changes}


@pytest.mark.cases(33)
@pytest.mark.parametrize("changes", [{}, BIASES, {"tie_word_embeddings": False}], ids=str)
@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("hrm_text")])
def test_the_described_tensors_are_those_that_the_model_has_places_for(name: str, changes: Config) -> None:
    config = {**CONFIGS[name], **changes}
    described = {each.name: (each.shape, each.offset) for each in architecture_of(config).tensors()}
    places = places_of(build_model(config, dtype=torch.float32, device=torch.device("meta")))
    assert described == {name: (tuple(place.shape), place.offset) for name, place in places.items()}


def test_gemma_3_rotates_its_windowed_layers_by_a_rope_of_their_own() -> None:
    untold = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"))
    types = ["sliding_attention", "full_attention"]
    described = architecture_of(wide("gemma3", **untold, layer_types=types, sliding_window=8))
    assert [(layer.attention.spec.window, layer.attention.rope) for layer in described.layers] == [(8, 1), (None, 0)]
    assert [rope.theta for rope in described.ropes] == [1e6, 1e4]


def test_olmo_3_scales_the_rope_of_its_layers_without_windows_alone() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    described = architecture_of(
        wide("olmo3", rope_scaling=yarn, layer_types=None, num_hidden_layers=4, sliding_window=8)
    )
    specs = [(layer.attention.spec.window, layer.attention.rope) for layer in described.layers]
    assert specs == [(8, 1), (8, 1), (8, 1), (None, 0)]
    assert [(rope.kind, rope.theta) for rope in described.ropes] == [("yarn", 5e5), ("default", 5e5)]


def test_a_model_is_described_without_torch() -> None:
    code = f"import sys; from ostro.models.registry import describe; describe({dict(TINY['llama'])!r}); "
    code += "print({'torch', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_ministral_scales_queries_by_position_where_more_than_its_original_context_is_asked_for() -> None:
    config = TINY["ministral3"]
    assert architecture_of(config).shape.max_seq_len == 60
    assert torch_only(architecture_of(config)) is None
    assert describe(config, max_seq_len=50).shape.max_seq_len == 50
    longer = describe(config, max_seq_len=61)
    assert isinstance(longer, Architecture)
    assert {layer.attention.query_scaling for layer in longer.layers} == {QueryScaling(60, 0.1)}
    assert torch_only(longer) == "its queries are scaled by position"
    unscaled = {**config, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    assert describe(unscaled, max_seq_len=61).shape.max_seq_len == 61


def test_exaones_windows_may_be_spelled_out() -> None:
    config = {**TINY["exaone4"], "num_hidden_layers": 4}

    def windows(pattern: object) -> list[int | None]:
        described = architecture_of({**config, "sliding_window_pattern": pattern})
        return [layer.attention.spec.window for layer in described.layers]

    assert windows("LLG") == [12, 12, None, 12]
    assert windows(2) == [12, None, 12, None]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("lfm2_moe", SIZES, "attention"), "its router weighs experts by sigmoids"),
        (config_of("llama", SIZES, hidden_act="relu2"), "its MLPs square their ReLUs"),
        (
            config_of("nemotron_h", SIZES, hybrid_override_pattern="**", num_hidden_layers=2),
            "its layers have a mixer or an MLP, not both",
        ),
    ],
    ids=["lfm2_moe", "llama", "nemotron_h"],
)
def test_what_only_torch_computes_is_refused_by_name_also_without_states(config: Config, reason: str) -> None:
    described = architecture_of(config)
    assert not described.states
    assert torch_only(described) == reason


def test_two_mixers_and_scaled_matrices_are_refused_by_name() -> None:
    described = architecture_of(TINY["falcon_h1"])
    attention = [layer.attends for layer in described.layers]
    single = [replace(layer, mixer=own) for layer, own in zip(described.layers, attention, strict=True)]
    assert described.states
    assert torch_only(replace(described, layers=tuple(single))) == "its matrices are scaled on loading"

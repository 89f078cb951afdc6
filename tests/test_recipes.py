"""Recipes against planning, the settings, the short names and the recorded figures."""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import pytest
import yaml
from every_family import TINY
from model_directory import write_model
from native_models import needs_library

from ostro.backends.planning import plan
from ostro.cli import _parser, main
from ostro.config import SETTINGS, EngineConfig
from ostro.errors import BadCheckpoint, BadRequest, ModelError, Unsupported, UnsupportedModel
from ostro.formats.json_file import read_json_object
from ostro.models.registry import describe
from ostro.recipes import DEVICES, Recipe, find_recipe, read_recipe, recipe_names, recipes
from ostro.recipes.devices import STANDARD
from ostro.recipes.planned import planned
from ostro.recipes.recipe import Value
from ostro.recipes.shelf import SHELF
from ostro.sampling_params import SamplingParams
from ostro.sources.aliases import ALIASES, find_alias
from ostro.sources.references import parse_model
from ostro.weights import open_checkpoint
from ostro.weights.described import DescribedCheckpoint, Formats

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
NAMES = recipe_names()
# What makes a model smaller, on a CPU and on a GPU.
SMALLER: Mapping[str, list[dict[str, Value]]] = {
    "cpu": [{}, {"quantize": "int8"}, {"quantize": "int4"}],
    "cuda": [{}, {"quantize": "fp8"}],
}
# Panels of the native core are as wide as the machine's vectors: sizes differ by their padding.
ACROSS_MACHINES = 0.01


# --- against planning -------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("name", NAMES)
def test_recipe_promises_what_planning_says(name: str) -> None:
    recipe = recipes()[name]
    checkpoint = recipe.checkpoint
    for setup in recipe.setups:
        device = DEVICES[setup.device]
        found, fits = planned(checkpoint, device, setup.settings)
        assert fits, setup.device
        stale = f"{name} is stale for {setup.device}: run `python tools/recipe_plans.py`"
        if device.kind == "cuda":
            assert found == setup.plan, stale
        else:
            told, now = msgspec.to_builtins(setup.plan), msgspec.to_builtins(found)
            assert told.pop("runs_on") == now.pop("runs_on"), stale
            assert told == pytest.approx(now, rel=ACROSS_MACHINES), stale


def test_no_more_sequences_run_than_there_are_slots_for_states() -> None:
    checkpoint, gpu = recipes()["nemotron-3-nano"].checkpoint, DEVICES["h100"]
    slots = plan(checkpoint, EngineConfig(device="cuda", serving=True), memory=gpu.memory).num_states
    assert planned(checkpoint, gpu, {}).expectation.at_a_time == slots
    assert planned(checkpoint, gpu, {"max_batch_seqs": 5}).expectation.at_a_time == 5


@needs_library
@pytest.mark.parametrize("name", [name for name in NAMES if recipes()[name].too_large_for])
def test_model_that_is_too_large_for_a_device_fits_there_with_no_setting(name: str) -> None:
    recipe = recipes()[name]
    checkpoint = recipe.checkpoint
    for device in (DEVICES[each] for each in recipe.too_large_for):
        for settings in SMALLER[device.kind]:
            # Mixtures of experts are not quantised on a GPU.
            with suppress(Unsupported):
                assert not planned(checkpoint, device, settings).fits, (device.name, settings)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_has_a_word_on_every_standard_device(name: str) -> None:
    recipe = recipes()[name]
    ours = [each.device for each in recipe.setups]
    assert len(set(ours)) == len(ours)
    assert set(ours) <= set(DEVICES)
    assert not set(ours) & set(recipe.too_large_for)
    assert set(STANDARD) <= {*ours, *recipe.too_large_for}


def test_plan_of_the_default_model_is_the_same_from_its_config_as_from_its_file() -> None:
    recipe = recipes()["smollm2-135m"]
    config = EngineConfig(device="cpu", threads=2, serving=True)
    from_file = plan(open_checkpoint("smollm2-135m"), config, memory=14 * GIB)
    from_config = plan(recipe.checkpoint, config, memory=14 * GIB)
    # The file of the whole model has its vocabulary, too: a few megabytes are mapped besides.
    assert replace(from_config, model=from_file.model, peak_bytes=from_file.peak_bytes) == from_file


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_from_a_config_is_that_of_the_files_it_describes(device: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    config = EngineConfig(device=device, kv_memory=1 << 20)  # type: ignore[arg-type]
    told = open_checkpoint(directory)
    formats = Formats(matrices="F32", embedding="F32", vectors="F32", in_one_file=True)
    checkpoint = DescribedCheckpoint.of(told.name, told.config, formats)
    ours, theirs = (plan(each, config, memory=GIB) for each in (checkpoint, told))
    # Files have headers.
    assert replace(ours, peak_bytes=theirs.peak_bytes) == theirs


def test_config_without_weights_cannot_be_loaded() -> None:
    checkpoint = recipes()["qwen3-0.6b"].checkpoint
    for read in (checkpoint.arrays, checkpoint.slices, checkpoint.tensors):
        with pytest.raises(ModelError, match="can be planned but not loaded"):
            read()


def test_config_that_does_not_tell_the_tensors_is_refused() -> None:
    quantized = {**TINY["llama"], "tie_word_embeddings": False, "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(UnsupportedModel, match="only those in MXFP4"):
        DescribedCheckpoint.of("tiny", quantized)
    with pytest.raises(UnsupportedModel, match="neither a decoder nor an encoder"):
        DescribedCheckpoint.of("tiny", TINY["hrm_text"])
    with pytest.raises(BadRequest, match="no number format 'Q9'"):
        Formats(matrices="Q9")


# --- against the settings ---------------------------------------------------------------------------------------------


def test_command_of_every_setup_is_one_that_serve_takes() -> None:
    parser = _parser(["serve"])
    for recipe in recipes().values():
        for setup in recipe.setups:
            program, *words = shlex.split(recipe.command(setup))
            args = vars(parser.parse_args(words))
            assert (program, words[0], args["model"].value) == ("ostro", "serve", (recipe.model,))
            assert {name: args[name].value for name in setup.settings} == setup.settings | {
                name: str(value) for name, value in setup.settings.items() if isinstance(value, int)
            }


@pytest.mark.full
def test_settings_of_recipes_are_accepted_by_the_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    combinations = {tuple(setup.options) for recipe in recipes().values() for setup in recipe.setups}
    assert len(combinations) > 3
    for options in combinations:
        assert main(["serve", *options, "--print-config"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_sampling_defaults_of_a_recipe_are_valid_and_the_short_names_own(name: str) -> None:
    recipe = recipes()[name]
    assert recipe.sampling_defaults.given == recipe.sampling
    filled = recipe.sampling_defaults.fill(SamplingParams(max_tokens=None))
    assert all(getattr(filled, key) == value for key, value in recipe.sampling.items() if key != "max_tokens")
    assert bool(recipe.sampling) == (recipe.sampling_source != "none known")
    alias = find_alias(recipe.model)
    if alias is not None and alias.generation_config:
        given = {key.replace("max_new_tokens", "max_tokens"): each for key, each in alias.generation_config.items()}
        assert recipe.sampling == {key: given[key] for key in recipe.sampling}


@pytest.mark.parametrize("name", NAMES)
def test_model_of_a_recipe_is_a_reference_to_what_it_names(name: str) -> None:
    recipe = recipes()[name]
    assert recipe.upstream.count("/") == 1
    if recipe.model != recipe.upstream:
        assert recipe.model in ALIASES
    assert parse_model(recipe.model).name
    assert find_recipe(recipe.upstream) == find_recipe(recipe.model.upper()) == recipe
    # Its family is served.
    describe(recipe.config)


# --- against what the repository holds --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if recipes()[name].config_source.startswith("bench/")])
def test_config_that_the_benchmarks_have_is_theirs(name: str) -> None:
    recipe = recipes()[name]
    theirs = read_json_object(ROOT / recipe.config_source)
    assert recipe.config == {key: value for key, value in theirs.items() if value is not None}


@pytest.mark.parametrize("name", [name for name in NAMES if recipes()[name].measured])
def test_measured_figure_stands_where_it_comes_from(name: str) -> None:
    for found in recipes()[name].measured:
        source = ROOT / found.source
        if not found.at:
            assert f"{found.figure:,g}" in source.read_text() or f"{found.figure:,.0f}" in source.read_text(), found
            continue
        value = json.loads(source.read_text())
        for key in found.at:
            value = value[key]
        assert found.figure == pytest.approx(median(value) if isinstance(value, list) else value, abs=0.06), found
        assert (ROOT / found.command.split()[1]).is_file()


def test_twenty_recipes_and_more_are_shipped() -> None:
    assert len(NAMES) >= 20
    assert {recipe.config["model_type"] for recipe in recipes().values()} >= {
        "qwen3",
        "llama",
        "gpt_oss",
        "gemma3_text",
    }


# --- what is no recipe ------------------------------------------------------------------------------------------------


def broken(tmp_path: Path, **changes: object) -> Path:
    """A recipe with other fields; None leaves one out."""
    fields = yaml.safe_load((SHELF / "qwen3-0.6b.yaml").read_text()) | changes
    path = tmp_path / "qwen3-0.6b.yaml"
    path.write_text(yaml.safe_dump({key: each for key, each in fields.items() if each is not None}))
    return path


SETUP = yaml.safe_load((SHELF / "qwen3-0.6b.yaml").read_text())["setups"][0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"licence": None}, "missing required field `licence`"),
        ({"setups": [SETUP | {"flags": "--x"}]}, r"unknown field `flags` - at `\$\.setups"),
        ({"setups": [SETUP | {"plan": {**SETUP["plan"], "fee": 1}}]}, "unknown field `fee`"),
        ({"setups": [SETUP | {"settings": {"quantise": "int8"}}]}, "no setting 'quantise'"),
        ({"setups": [SETUP | {"settings": {"quantize": "int9"}}]}, "quantize must be one of"),
        ({"setups": [SETUP | {"settings": {"max_seq_len": 0}}]}, "max_seq_len must be at least 1"),
        ({"setups": [SETUP | {"settings": {"kv_memory": "much"}}]}, "a memory size is written 512M"),
        ({"setups": [SETUP | {"device": "abacus"}]}, "no device 'abacus'"),
        ({"too_large_for": ["abacus"]}, "no device 'abacus'"),
        ({"sampling": {"temperature": 9}}, "temperature must be"),
        ({"sampling": {"heat": 1}}, "heat"),
        ({"tools": "telepathy"}, "telepathy"),
        ({"sampling_source": "a rumour"}, "a rumour"),
        ({"name": "other"}, "name is 'other'"),
    ],
)
def test_file_that_is_no_recipe_is_refused_by_the_fields_name(
    changes: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = broken(tmp_path, **changes)
    with pytest.raises(BadCheckpoint, match=told) as error:
        read_recipe(path)
    assert str(path) in error.value.message


def test_sizes_of_settings_may_be_written_as_on_the_command_line(tmp_path: Path) -> None:
    path = broken(tmp_path, setups=[SETUP | {"settings": {"kv_memory": "2G", "prefix_caching": False}}])
    recipe: Recipe = read_recipe(path)
    assert recipe.command(recipe.setups[0]) == "ostro serve qwen3-0.6b --kv-memory 2G --no-prefix-caching"
    assert set(recipe.setups[0].settings) <= set(SETTINGS)

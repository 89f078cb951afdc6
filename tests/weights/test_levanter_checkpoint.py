"""Checkpoints written through TensorStore as Levanter writes them: the same weights come back, or a clear error."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dense_context import dense_logits
from every_family import CASES as FAMILY_CASES
from every_family import family_of_case
from family_case import LEVANTER_SIZES, LevanterCase
from levanter_directory import Arrays, Generation, gpt2_arrays, levanter_arrays, write_checkpoint, write_yaml
from safetensors.torch import save_file

from ostro.errors import BadCheckpoint, BadRequest, ModelNotFound, OstroError, UnsupportedModel
from ostro.system.requirements import install_command
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights, places_of
from ostro.weights import Checkpoint, open_checkpoint
from ostro.weights.levanter_checkpoint import is_levanter, open_levanter


@dataclass(frozen=True)
class Case:
    """A model as Levanter's settings have it, as config.json has the same one, and how Levanter writes it."""

    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    written: LevanterCase


CASES = {
    name: Case(
        case.settings,
        {
            **family.spelled(LEVANTER_SIZES),
            "model_type": family.model_type,
            "architectures": [family_of_case(file).architecture],
            **case.config,
        },
        case,
    )
    for file, family in FAMILY_CASES.items()
    for name, case in family.levanter.items()
}
IDS = [3, 17, 5, 0, 39, 8, 8, 21]


def random_weights(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    places = places_of(build_model(config, dtype=torch.float32))
    return {name: (0.3 * torch.randn(place.shape)).to(dtype) for name, place in places.items()}


def arrays_of(case: Case, weights: Mapping[str, torch.Tensor], *, stacked: bool = True, padding: int = 0) -> Arrays:
    if case.written.like_gpt2:
        return gpt2_arrays(weights, case.config, padding=padding)
    return levanter_arrays(
        weights,
        case.config,
        stacked=stacked,
        layers=case.written.layers,
        padding=padding,
        norms_of_all_heads=case.written.norms_of_all_heads,
    )


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    return dense_logits(model, IDS)


def assert_same(checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor]) -> None:
    loaded = dict(checkpoint.tensors())
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return write_yaml(tmp_path / "llama.yaml", CASES["llama"].settings)


def write_llama(directory: Path, **options: Any) -> Path:
    case = CASES["llama"]
    return write_checkpoint(directory, arrays_of(case, random_weights(case.config)), **options)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stacked"), [*product(CASES, (True,)), *product(("qwen", "gemma3", "olmo3", "mixtral"), (False,))]
)
def test_each_family_gives_the_weights_and_the_logits_that_safetensors_gives(
    tmp_path: Path, name: str, stacked: bool
) -> None:
    case = CASES[name]
    weights = random_weights(case.config)
    written = write_checkpoint(tmp_path / "run" / "step-7", arrays_of(case, weights, stacked=stacked), step=7)
    checkpoint = open_levanter(written, write_yaml(tmp_path / "model.yaml", case.settings))
    assert_same(checkpoint, weights)
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(dict(case.config)))
    save_file(weights, hub / "model.safetensors")
    assert torch.equal(logits(checkpoint), logits(open_checkpoint(hub)))


@pytest.mark.parametrize(
    ("generation", "stacked", "layers_per_chunk", "dtype"),
    [
        *product(get_args(Generation), (True, False), (1,), (torch.float32,)),
        *product(get_args(Generation), (True,), (2, 3), (torch.bfloat16,)),
    ],
)
def test_each_generation_gives_the_same_weights(
    tmp_path: Path,
    settings: Path,
    generation: Generation,
    stacked: bool,
    layers_per_chunk: int,
    dtype: torch.dtype,
) -> None:
    case = CASES["llama"]
    weights = random_weights(case.config, dtype)
    arrays = arrays_of(case, weights, stacked=stacked)
    written = write_checkpoint(tmp_path / "step-1", arrays, generation=generation, layers_per_chunk=layers_per_chunk)
    checkpoint = open_levanter(written, settings)
    assert_same(checkpoint, weights)
    assert checkpoint.config["torch_dtype"] == str(dtype).removeprefix("torch.")


def whole(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array that this one is a part of."""
    return whole(array.base) if isinstance(array.base, np.ndarray) else array


def test_stacked_layers_are_read_a_chunk_at_a_time(tmp_path: Path, settings: Path) -> None:
    checkpoint = open_levanter(write_llama(tmp_path / "step-1", layers_per_chunk=2), settings)
    sizes = [whole(array.raw).nbytes / array.raw.nbytes for name, array in checkpoint.arrays() if "up_" in name]
    assert sizes == [2.0, 2.0, 1.0]


@pytest.mark.parametrize(("name", "matrix"), [("llama", "lm_head.weight"), ("gpt2", "transformer.wte.weight")])
def test_a_padded_vocabulary_is_cut_where_the_settings_tell_its_size(tmp_path: Path, name: str, matrix: str) -> None:
    case = CASES[name]
    weights = random_weights(case.config)
    written = write_checkpoint(tmp_path / "step-1", arrays_of(case, weights, padding=24))
    told = open_levanter(written, write_yaml(tmp_path / "told.yaml", {**case.settings, "vocab_size": 40}))
    assert_same(told, weights)
    assert told.config["vocab_size"] == 40
    untold = open_levanter(written, write_yaml(tmp_path / "untold.yaml", case.settings))
    assert untold.config["vocab_size"] == 64
    assert dict(untold.tensors())[matrix].shape == (64, 32)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_and_columns_are_read_of_arrays_with_an_axis_for_heads(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    weights = random_weights(case.config)
    written = write_checkpoint(tmp_path / "step-1", arrays_of(case, weights))
    read = set()
    for tensor, own in open_levanter(written, write_yaml(tmp_path / "model.yaml", case.settings)).slices():
        for first in (0, 3):
            index = tuple(slice(first, size - first) for size in own.shape)
            assert np.array_equal(own.read(index), weights[tensor][index].numpy()), tensor
        read.add(tensor)
    assert read == weights.keys()


def test_zeros_that_the_database_leaves_out_are_zeros(tmp_path: Path) -> None:
    case = CASES["qwen"]
    weights = random_weights(case.config)
    weights = {name: tensor * 0 if name.endswith("bias") else tensor for name, tensor in weights.items()}
    written = write_checkpoint(tmp_path / "step-1", arrays_of(case, weights))
    assert_same(open_levanter(written, write_yaml(tmp_path / "qwen.yaml", case.settings)), weights)


@pytest.mark.full
def test_opening_imports_no_torch(tmp_path: Path, settings: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from ostro.weights.levanter_checkpoint import open_levanter\n"
        "print(open_levanter(Path(sys.argv[1]), Path(sys.argv[2])).name, 'torch' in sys.modules)"
    )
    written = write_llama(tmp_path / "tiny" / "step-1000")
    command = [sys.executable, "-c", program, str(written), str(settings)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "tiny-step-1000 False\n"


def test_without_tensorstore_the_error_says_what_to_install(
    tmp_path: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_llama(tmp_path / "step-1")
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(OstroError, match=re.escape(install_command("levanter"))):
        open_levanter(written, settings)


# --- which checkpoint -------------------------------------------------------------------------------------------------


def test_a_run_gives_its_newest_complete_checkpoint(
    tmp_path: Path, settings: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "llama"
    for step in (1000, 900, 20):
        write_llama(run / f"step-{step}", step=step)
    write_llama(run / "step-2000", step=2000, complete=False)
    (write_llama(run / "step-3000", step=3000) / "metadata.json").write_text('{"st')
    (run / "hf").mkdir()
    with caplog.at_level(logging.WARNING):
        checkpoint = open_levanter(run, settings)
    assert (checkpoint.name, checkpoint.path) == ("llama-step-1000", run / "step-1000")
    assert "step-2000 is incomplete" in caplog.text


def test_checkpoint_describes_itself(tmp_path: Path, settings: Path) -> None:
    written = write_llama(tmp_path / "runs" / "llama" / "step-1000")
    checkpoint: Checkpoint = open_levanter(written, settings)
    assert (checkpoint.name, checkpoint.path) == ("llama-step-1000", written)
    assert (checkpoint.generation_config, checkpoint.pooling) == ({}, None)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("llama/step-1000", "llama-step-1000"),
        ("runs/llama", "llama-step-1000"),
        ("tiny/checkpoints/step-1000", "tiny-step-1000"),
        ("step-1000", "step-1000"),
    ],
)
def test_a_name_that_is_given_tells_the_run(tmp_path: Path, settings: Path, given: str, name: str) -> None:
    assert open_levanter(write_llama(tmp_path / "cache@0"), settings, name=given).name == name


def test_a_tokenizer_is_asked_for_unless_there_is_one(tmp_path: Path, settings: Path) -> None:
    checkpoint = open_levanter(write_llama(tmp_path / "step-1"), settings)
    with pytest.raises(ModelNotFound, match=r"no tokenizer.*Give --tokenizer"):
        _ = checkpoint.tokenizer_path
    (checkpoint.path / "tokenizer.json").write_text("{}")
    assert checkpoint.tokenizer_path == checkpoint.path


def test_the_settings_reach_the_base_of_a_starter(tmp_path: Path, settings: Path) -> None:
    """They were dropped on the way, and then asked for."""
    write_llama(tmp_path / "brain" / "step-1")
    (tmp_path / "brain" / "starter_brain.json").write_text(json.dumps({"base_model": "step-1"}))
    assert open_checkpoint(tmp_path / "brain", model_config=str(settings)).path == tmp_path / "brain" / "step-1"


@pytest.mark.parametrize("generation", get_args(Generation))
def test_a_checkpoint_is_known_by_its_files(tmp_path: Path, generation: Generation) -> None:
    written = write_llama(tmp_path / "run" / "step-5", generation=generation, complete=False)
    assert is_levanter(written)
    assert is_levanter(tmp_path / "run")
    assert not is_levanter(tmp_path)


def test_other_directories_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    written = write_llama(tmp_path / "hub")
    (written / "config.json").write_text("{}")
    assert not is_levanter(written)
    assert not is_levanter(tmp_path / "none")
    assert not is_levanter(written / "config.json")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text("{}")
    assert not is_levanter(tmp_path / "data")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_the_settings_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="Give --model-config"):
        open_levanter(write_llama(tmp_path / "step-1"), None)


def test_missing_directory_or_checkpoint_is_reported(tmp_path: Path, settings: Path) -> None:
    with pytest.raises(ModelNotFound, match="no directory"):
        open_levanter(tmp_path / "none", settings)
    with pytest.raises(ModelNotFound, match="holds no Levanter checkpoint"):
        open_levanter(tmp_path, settings)


@pytest.mark.parametrize("generation", get_args(Generation))
def test_an_incomplete_checkpoint_is_refused(tmp_path: Path, settings: Path, generation: Generation) -> None:
    written = write_llama(tmp_path / "step-1", generation=generation, complete=False)
    for path in (written, tmp_path):
        with pytest.raises(BadCheckpoint, match=r"step-1 is incomplete: it has no metadata\.json"):
            open_levanter(path, settings)


def test_metadata_without_a_step_or_without_weights_is_refused(tmp_path: Path, settings: Path) -> None:
    written = write_llama(tmp_path / "step-1")
    (written / "metadata.json").write_text('{"timestamp": "now"}')
    with pytest.raises(BadCheckpoint, match="does not state the step"):
        open_levanter(written, settings)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "metadata.json").write_text('{"step": 2}')
    with pytest.raises(BadCheckpoint, match=r"neither model/transformer nor manifest\.ocdbt"):
        open_levanter(tmp_path / "step-2", settings)


@pytest.mark.parametrize(
    ("generation", "path"),
    [
        ("directories", "model/transformer/layers/stacked/mlp/up_proj/weight"),
        ("database", "model/lm_head/weight"),
        ("manifest", "model/embeddings/token_embeddings/weight"),
        ("manifest", "model/transformer/layers/stacked/self_attn/k_proj/weight"),
    ],
)
def test_a_missing_array_is_named(tmp_path: Path, settings: Path, generation: Generation, path: str) -> None:
    case = CASES["llama"]
    arrays = arrays_of(case, random_weights(case.config))
    del arrays[path]
    written = write_checkpoint(tmp_path / "step-1", arrays, generation=generation)
    with pytest.raises(BadCheckpoint, match=f"has no array '{path}'"):
        open_levanter(written, settings)


def test_a_missing_block_is_named(tmp_path: Path, settings: Path) -> None:
    case = CASES["llama"]
    arrays = arrays_of(case, random_weights(case.config), stacked=False)
    arrays = {path: array for path, array in arrays.items() if "/blocks/2/" not in path}
    written = write_checkpoint(tmp_path / "step-1", arrays)
    with pytest.raises(BadCheckpoint, match="has no array 'model/transformer/layers/blocks/2/"):
        open_levanter(written, settings)


def test_a_model_without_layers_is_refused(tmp_path: Path, settings: Path) -> None:
    case = CASES["llama"]
    arrays = arrays_of(case, random_weights(case.config))
    written = write_checkpoint(tmp_path / "step-1", {path: a for path, a in arrays.items() if "layers" not in path})
    with pytest.raises(BadCheckpoint, match="no layers of a language model"):
        open_levanter(written, settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4}, r"q_proj/weight' has shape \(3, 2, 2, 8, 32\), .* ask for \(4, 2, 2, 8, 32\)"),
        ({"num_kv_heads": 4}, r"q_proj/weight' has shape \(3, 2, 2, 8, 32\), .* ask for \(3, 4, 1, 8, 32\)"),
        ({"hidden_dim": 64}, r"token_embeddings/weight' has shape \(40, 32\), .* ask for \(40, 64\)"),
        ({"intermediate_dim": 64}, r"gate_proj/weight' has shape \(3, 48, 32\), .* ask for \(3, 64, 32\)"),
        ({"vocab_size": 41}, r"token_embeddings/weight' has shape \(40, 32\), .* ask for \(41, 32\)"),
    ],
)
def test_a_wrong_shape_is_named_with_both(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    wrong = write_yaml(tmp_path / "wrong.yaml", {**CASES["llama"].settings, **changes})
    with pytest.raises(BadCheckpoint, match=message):
        open_levanter(write_llama(tmp_path / "step-1"), wrong)


def test_more_blocks_than_layers_are_refused(tmp_path: Path) -> None:
    case = CASES["llama"]
    written = write_checkpoint(tmp_path / "step-1", arrays_of(case, random_weights(case.config), stacked=False))
    fewer = write_yaml(tmp_path / "fewer.yaml", {**case.settings, "num_layers": 2})
    with pytest.raises(BadCheckpoint, match=r"blocks/2/.*no place for"):
        open_levanter(written, fewer)


@pytest.mark.parametrize("name", ["llama-qk-norm", "qwen", "gemma2"])
def test_weights_that_the_settings_have_no_place_for_are_refused(tmp_path: Path, settings: Path, name: str) -> None:
    written = write_checkpoint(tmp_path / "step-1", arrays_of(CASES[name], random_weights(CASES[name].config)))
    with pytest.raises(BadCheckpoint, match="no place for"):
        open_levanter(written, settings)


def test_arrays_of_integers_are_refused(tmp_path: Path, settings: Path) -> None:
    case = CASES["llama"]
    arrays = arrays_of(case, random_weights(case.config))
    arrays["model/transformer/norm/weight"] = arrays["model/transformer/norm/weight"].astype("int32")
    with pytest.raises(BadCheckpoint, match=r"norm/weight' .* holds int32"):
        open_levanter(write_checkpoint(tmp_path / "step-1", arrays), settings)


def test_a_lost_chunk_is_an_error_and_not_zeros(tmp_path: Path, settings: Path) -> None:
    checkpoint = open_levanter(write_llama(tmp_path / "step-1", generation="directories"), settings)
    (checkpoint.path / "model/transformer/layers/stacked/mlp/up_proj/weight/1.0.0").unlink()
    with pytest.raises(BadCheckpoint, match=r"up_proj/weight.*missing.*Copy it again"):
        list(checkpoint.tensors())


@pytest.mark.parametrize("damage", ["lost", "short"])
def test_damaged_files_of_a_database_are_an_error(tmp_path: Path, settings: Path, damage: str) -> None:
    checkpoint = open_levanter(write_llama(tmp_path / "step-1"), settings)
    largest = max((checkpoint.path / "d").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    if damage == "lost":
        largest.unlink()
    with pytest.raises(BadCheckpoint, match="Copy it again"):
        list(checkpoint.tensors())


def test_a_damaged_or_missing_manifest_is_an_error(tmp_path: Path, settings: Path) -> None:
    written = write_llama(tmp_path / "step-1")
    (written / "manifest.ocdbt").write_bytes(b"nothing")
    with pytest.raises(BadCheckpoint, match=r"manifest\.ocdbt .*Copy it again"):
        open_levanter(written, settings)
    (written / "manifest.ocdbt").unlink()
    (written / "model" / "transformer").mkdir(parents=True)
    with pytest.raises(BadCheckpoint, match=r"has manifest\.json but no manifest\.ocdbt"):
        open_levanter(written, settings)


@pytest.mark.parametrize("change", [{"format_version": 2}, {"array_driver": "n5"}, {"kvstore_driver": "file"}])
def test_a_version_to_come_is_refused(tmp_path: Path, settings: Path, change: dict[str, object]) -> None:
    written = write_llama(tmp_path / "step-1")
    manifest = json.loads((written / "manifest.json").read_text())
    (written / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(UnsupportedModel, match="Ostro reads version 1 with zarr3 over ocdbt"):
        open_levanter(written, settings)

"""How a model gets into the native core: what is packed and found again, and what runs on torch instead, and why."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from native_directory import WIDE, generate, load, packed_files, write
from native_models import ModelCheckpoint, needs_library, savable_model
from safetensors.torch import save_file
from tiny_models import VOCAB

from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import NOT_FINITE
from ostro.errors import BadCheckpoint, BadRequest, Unsupported
from ostro.kernels.cpu.library import Cells, instruction_sets
from ostro.sampling_params import SamplingParams

pytestmark = needs_library


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))


def test_a_model_is_packed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory = write(tmp_path / "model")
    first = load(directory)
    assert "packing the weights, once" in caplog.text
    [file] = packed_files()
    caplog.clear()
    second = load(directory)
    assert "packing" not in caplog.text
    assert packed_files() == [file]
    assert generate(first) == generate(second) == generate(load(directory, backend="torch"))


def test_other_bits_another_context_and_changed_weights_are_packed_again(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    plain = load(directory)
    few = load(directory, quantize="int4")
    assert isinstance(few, NativeRunner)
    assert few.program.spec.precision == "int4, int8"
    assert few.spec.num_pages == plain.spec.num_pages
    load(directory, max_seq_len=64)
    assert len(packed_files()) == 3
    changed = {name: tensor * 1.1 for name, tensor in ModelCheckpoint(savable_model(WIDE), WIDE).tensors()}
    save_file(changed, directory / "model.safetensors")
    os.utime(directory / "model.safetensors", ns=(1, 1))
    before = set(packed_files())
    del plain
    load(directory)
    # The new one takes the place of what was packed alike before.
    assert len(packed_files()) == 3
    assert len(set(packed_files()) - before) == 1


@pytest.mark.cases(2)
@pytest.mark.parametrize("damage", [b"", b"OSTRO CPU", b"OSTRO CPU" + bytes(100), b"nonsense" * 20])
def test_a_damaged_file_is_made_again(damage: bytes, tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    expected = generate(load(directory))
    [file] = packed_files()
    file.write_bytes(damage)
    assert generate(load(directory)) == expected


@pytest.mark.full
def test_the_second_start_needs_no_torch(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    load(directory)
    program = (
        "import sys, pathlib; from ostro.config import EngineConfig; from ostro.backends.loading import load_runner; "
        "from ostro.weights import open_checkpoint; path = pathlib.Path(sys.argv[1]); "
        "runner = load_runner(open_checkpoint(path), EngineConfig(device='cpu', kv_memory=4 << 20)); "
        "print(type(runner).__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["NativeRunner", "False"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_any_width_are_served(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", dtype=dtype)
    runner = load(directory)
    assert isinstance(runner, NativeRunner)
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert runner.program.spec.precision == name
    assert generate(runner) == generate(load(directory, backend="torch"))


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"head_dim": 8}, {}, "its heads are 8 wide"),
        ({"hidden_act": "relu"}, {}, "its activation, relu, has no native kernel"),
        ({}, {"page_size": 8}, "page_size is 8"),
        ({}, {"backend": "torch"}, None),
    ],
)
def test_model_on_torch_says_why(
    changes: Mapping[str, object],
    settings: Mapping[str, object],
    reason: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    directory = write(tmp_path / "model", {**WIDE, **changes})
    assert isinstance(load(directory, **settings), TorchRunner)
    assert (reason or "") in caplog.text
    assert packed_files() == []
    if reason is not None:
        with pytest.raises(Unsupported, match=reason) as caught:
            load(directory, **settings, backend="native")
        assert caught.value.param == "backend"


def test_without_the_library_models_run_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OSTRO_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    assert isinstance(load(write(tmp_path / "model")), TorchRunner)
    assert "The native core was not built" in caplog.text


def test_a_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setenv("OSTRO_NATIVE_LIBRARY", str(tmp_path / "broken.so"))
    assert isinstance(load(write(tmp_path / "model")), TorchRunner)
    assert "The native core cannot be loaded" in caplog.text


def test_better_instruction_sets_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = instruction_sets()
    monkeypatch.setenv("OSTRO_NATIVE_ISA", last)
    assert instruction_sets() == [last]
    runner = load(write(tmp_path / "model"))
    assert isinstance(runner, NativeRunner)
    assert runner.isa == last


def test_an_instruction_set_that_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_NATIVE_ISA", "abacus")
    with pytest.raises(Unsupported, match=r"OSTRO_NATIVE_ISA=abacus: this machine and library have .*plain"):
        instruction_sets()


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_keys_and_values_are_kept_as_asked(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    runner = load(directory, kv_dtype=name)
    assert isinstance(runner, NativeRunner)
    # Fewer bits, more pages in the same memory.
    slot = 16 * Cells[name.upper()].bytes + (4 if name == "int8" else 0)
    assert runner.spec.num_pages == (4 << 20) // (2 * 2 * 2 * 16 * slot)
    assert len(generate(runner)) == 6


def test_kv_dtypes_of_other_devices_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    with pytest.raises(BadRequest, match="fp8 needs a GPU"):
        load(directory, kv_dtype="fp8")
    with pytest.raises(Unsupported, match="needs the native core"):
        load(directory, kv_dtype="int8", backend="torch")


def test_tensors_that_are_missing_or_misshapen_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    tensors = dict(ModelCheckpoint(savable_model(WIDE), WIDE).tensors())
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lacks 1 tensors \(model\.norm\.weight\)"):
        load(directory)
    save_file({**tensors, "model.norm.weight": norm[:-1].clone()}, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="has shape"):
        load(directory)
    assert packed_files() == []


def test_where_the_cache_cannot_be_written_weights_are_packed_for_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "file"))
    runner = load(write(tmp_path / "model"))
    assert isinstance(runner, NativeRunner)
    assert "Set OSTRO_CACHE to a directory that you own." in caplog.text
    assert len(generate(runner)) == 6


def test_files_beside_the_weights_change_nothing(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    for text in ("a", "ab", "abc"):
        (directory / "server.log").write_text(text)
        load(directory)
    assert len(packed_files()) == 1


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """With a limit on the size of files, which writing meets as it meets a full disk."""
    directory = write(tmp_path / "model")
    program = (
        "import sys, resource, signal, pathlib; from ostro.config import EngineConfig; "
        "import ostro.torch_models.build; from ostro.backends.loading import load_runner; "
        "from ostro.weights import open_checkpoint; "
        "import ostro.backends.torch.load, ostro.backends.native.packing, logging; logging.basicConfig(level=20); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
        "path = pathlib.Path(sys.argv[1]); "
        "runner = load_runner(open_checkpoint(path), EngineConfig(device='cpu', kv_memory=4 << 20)); "
        "print(type(runner).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["TorchRunner"]
    assert "packed weights cannot be written" in done.stderr


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_non_finite_weights_are_not_rounded_away(bits: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    tensors = dict(ModelCheckpoint(savable_model(WIDE), WIDE).tensors())
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, directory / "model.safetensors")
    core = EngineCore(load(directory, quantize=bits))
    core.add(Request(id=0, prompt_ids=(1, 2), params=SamplingParams(max_tokens=2, temperature=0), seed=0))
    [gain] = core.step()
    assert gain.error == NOT_FINITE


def test_double_precision_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", dtype=torch.float64)
    assert isinstance(load(directory), NativeRunner)
    assert generate(load(directory)) == generate(load(directory, backend="torch"))


def test_vectors_of_the_packed_file_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    runner = load(write(tmp_path / "model"))
    assert isinstance(runner, NativeRunner)
    spec = runner.program.spec
    first = next(step for step in spec.steps if step.norm is not None)
    norms = dict(ModelCheckpoint(savable_model(WIDE), WIDE).tensors())
    stored = runner.program._packed.vector(first.norm or 0)
    np.testing.assert_array_equal(stored, norms["model.layers.0.input_layernorm.weight"].numpy())
    assert spec.vocab_size == VOCAB

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hrm_brain import write_brain
from levanter_directory import TINY_LLAMA, levanter_arrays, write_checkpoint, write_yaml
from model_directory import write_model
from safetensors.torch import load_file

from ostro.backends.planning import plan
from ostro.cli import main
from ostro.config import EngineConfig
from ostro.formats.json_file import read_json_object

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def planned(model: Path, *args: str) -> int:
    return main(["plan", str(model), *args])


def test_table_says_what_is_needed_and_what_fits(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(model, "--memory", "1G", "--kv-memory", "1M", "--device", "cpu") == 0
    table = capsys.readouterr().out
    for label in ("weights:", "keys and values:", "other:", "total:", "longest sequence:"):
        assert label in table
    assert "of 1,024 MiB that are free (CPU)" in table
    # A page of 16 tokens takes 4 KiB, so 256 of them fit: 16 sequences of all 256 tokens.
    assert "256 pages of 16 tokens" in table
    assert table.splitlines()[-1].split() == ["256", "16"]


def test_json_holds_the_whole_plan_in_bytes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--page-size", "8", "--max-batch-seqs", "3", "--max-seq-len", "100", "--quantize", "int8"]
    assert planned(model, "--json", "--memory", "2G", "--device", "cpu", *options) == 0
    found = json.loads(capsys.readouterr().out)
    config = EngineConfig(device="cpu", page_size=8, max_batch_seqs=3, max_seq_len=100, quantize="int8", serving=True)
    expected = plan(model, config, memory=2 * GIB)
    assert (found["total_bytes"], found["num_pages"]) == (expected.total_bytes, expected.num_pages)
    assert found["sequences"] == [{"length": 100, "sequences": 3}]
    assert found["fits"] is True


def test_model_that_does_not_fit_is_reported_with_status_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(model, "--memory", "20M", "--device", "cpu") == 1
    assert "It does not fit." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (["--device", "cpu"], "lower --kv-memory, try --quantize int8 or int4, or take"),
        (["--device", "cpu", "--backend", "jax"], "lower --kv-memory, or take"),
        (["--device", "cuda"], "try --quantize fp8, raise --tensor-parallel, or take"),
        (["--device", "tpu"], "lower --kv-memory, raise --tensor-parallel, or take"),
        (["--device", "mps"], "lower --kv-memory, try --dtype float16, or take"),
    ],
)
def test_model_that_does_not_fit_is_refused_with_what_would_help(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[str], cure: str
) -> None:
    assert planned(model, "--memory", "20M", *options) == 1
    assert cure in capsys.readouterr().out


def test_gpu_that_is_not_here_needs_its_memory(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned(model, "--device", "cuda") == 2
    assert "Say how much memory it has" in capsys.readouterr().err
    assert planned(model, "--device", "cuda", "--memory", "141G", "--kv-dtype", "fp8") == 0
    assert "of 141.0 GiB that are free (GPU)" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--tokenizer", "--no-prefix-caching", "--threads"])
def test_options_that_memory_does_not_depend_on_are_refused(
    model: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        planned(model, option)
    assert exit.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.full
def test_command_imports_no_torch(model: Path) -> None:
    code = "import sys; from ostro.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", str(model), "--device", "cpu"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "False"


def test_levanter_checkpoint_is_planned_like_its_export(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_json_object(model / "config.json")
    arrays = levanter_arrays(load_file(model / "model.safetensors"), config)
    checkpoint = write_checkpoint(tmp_path / "step-1000", arrays)
    settings = write_yaml(tmp_path / "llama.yaml", TINY_LLAMA)
    weights = []
    for path, options in ((model, ()), (checkpoint, ("--model-config", str(settings)))):
        assert planned(path, "--json", "--memory", "2G", "--device", "cpu", *options) == 0
        weights.append(json.loads(capsys.readouterr().out)["weights_bytes"])
    assert weights[0] == weights[1] > 0


def test_an_hrm_has_nothing_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_brain(tmp_path / "brain")
    assert planned(tmp_path / "brain") == 1
    assert "keeps no keys and values" in capsys.readouterr().err

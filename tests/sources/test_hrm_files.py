"""Hierarchical Reasoning Models at a place of many models: which of their files are fetched, and under which names."""

from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from hrm_brain import write_brain
from model_directory import write_model
from object_stores import BUCKET, ObjectStore

from ostro.sources.fetch import fetch_model
from ostro.sources.files import model_files
from ostro.sources.models import FoundModel, list_models
from ostro.weights import open_checkpoint

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

BRAIN = {
    "brain.json",
    "checkpoint_metadata.json",
    "mind/actv1_student.safetensors",
    "mind/q_head.pt",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
}


def write_place(root: Path) -> None:
    """A brain with its tokenizer, and a run of upstream's trainer with an older step."""
    write_brain(root / "thinker", vocab=700)
    (root / "thinker" / "tokenizer").mkdir()
    for path in write_model(root / "tok").iterdir():
        if path.name.startswith("tokenizer"):
            path.rename(root / "thinker" / "tokenizer" / path.name)
        else:
            path.unlink()
    (root / "tok").rmdir()
    newest = write_brain(root / "lab" / "sudoku", dialect="upstream")
    newest.with_name("step_90").write_bytes(b"an older one")
    (root / "lab" / "sudoku" / "losses.py").write_text("raise SystemExit")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (BRAIN | {"README.md", "mind/optimizer.pt", "mind/actv1_student.pt", "runs/1/config.json"}, BRAIN),
        ({"actv1_student.pt", "brain.json", "vocab.txt", "notes.txt"}, {"actv1_student.pt", "brain.json", "vocab.txt"}),
        ({"mindful/q_head.pt", "mind/actv1_student.pt"}, {"mind/actv1_student.pt"}),
        ({"a/actv1_student.safetensors", "b/actv1_student.pt"}, {"a/actv1_student.safetensors"}),
    ],
)
def test_the_files_of_a_brain_are_its_weights_settings_and_tokenizer(names: set[str], wanted: set[str]) -> None:
    assert set(model_files(names)) == wanted


def test_brains_and_runs_under_a_directory_are_found(tmp_path: Path) -> None:
    write_place(tmp_path)
    assert list_models(str(tmp_path)) == [
        FoundModel("lab/sudoku", f"{tmp_path}/lab/sudoku"),
        FoundModel("thinker", f"{tmp_path}/thinker"),
    ]
    assert list_models(str(tmp_path / "thinker")) == [FoundModel("thinker", str(tmp_path / "thinker"))]


@pytest.mark.full
def test_brains_and_runs_in_a_bucket_are_found_fetched_and_opened(
    store: ObjectStore, proxy: FaultProxy, prefix: str, tmp_path: Path
) -> None:
    write_place(tmp_path / "place")
    files = [path for path in (tmp_path / "place").rglob("*") if path.is_file()]
    root = store.put_model(prefix, {str(f.relative_to(tmp_path / "place")): f.read_bytes() for f in files})
    assert root.endswith(f"{BUCKET}/{prefix}")
    found = {model.name: model.reference for model in list_models(f"{root}/")}
    assert found == {"lab/sudoku": f"{root}/lab/sudoku", "thinker": f"{root}/thinker"}
    brain = open_checkpoint(fetch_model(found["thinker"], progress=False))
    assert brain.config["dialect"] == "aios"
    assert brain.tokenizer_path.name == "tokenizer"
    run = open_checkpoint(fetch_model(found["lab/sudoku"], progress=False))
    assert run.config["dialect"] == "upstream"
    assert {path.name for path in run.path.iterdir()} >= {"all_config.yaml", "step_100"}
    assert not {path.name for path in run.path.iterdir()} & {"step_90", "losses.py"}

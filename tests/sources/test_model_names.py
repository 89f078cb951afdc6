import os
from pathlib import Path

import pytest
from model_directory import write_model

from ostro.errors import ModelNotFound
from ostro.sources.references import parse_model
from ostro.weights import open_checkpoint


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/one", "org/one"),
        ("org/one@main", "org/one"),
        ("gs://my-models/models/acme/tiny/", "acme/tiny"),
        ("s3://my-models/tiny.gguf", "tiny"),
        ("pypi:some-wheel==1.2", "some-wheel"),
        ("./nowhere/tiny", "tiny"),
        ("./nowhere/tiny-00001-of-00002.gguf", "tiny"),
        ("./nowhere/model.safetensors", "nowhere"),
        ("/", "default"),
    ],
)
def test_a_model_has_a_name_before_it_is_there(reference: str, name: str) -> None:
    assert parse_model(reference).name == name


def test_a_directory_has_a_name_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` was a model with an empty name."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(inner)
    names = [parse_model(each).name for each in (".", "./", "..", "../inner", str(inner), f"{inner}/", "~/outer")]
    assert names == ["inner", "inner", "outer", "inner", "inner", "inner", "outer"]


def test_it_is_the_name_that_the_files_have_once_they_are_open(tmp_path: Path) -> None:
    """While it was loaded a model had another name than before and after, which could be another model's."""
    directory = write_model(tmp_path / "tiny")
    other = directory / "weights.safetensors"
    os.link(directory / "model.safetensors", other)
    for reference in (None, str(directory), str(directory / "model.safetensors"), str(other)):
        assert parse_model(reference).name == open_checkpoint(reference).name


def test_an_invalid_address_is_reported() -> None:
    with pytest.raises(ModelNotFound, match="Write gs://BUCKET/PATH"):
        parse_model("gs://Bucket/x")

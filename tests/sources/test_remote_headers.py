"""Hollow copies of models: they open as the models do, and hardly anything was read for them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_factory import write_gguf
from model_directory import write_pickles
from safetensors.numpy import save_file

from ostro.errors import BadCheckpoint, DownloadFailed, ModelNotFound
from ostro.formats.gguf_header import read_gguf_header
from ostro.sources.files import INDEX
from ostro.sources.remote_headers import hollow_copy
from ostro.weights.hf_checkpoint import open_directory


class Elsewhere:
    """A directory as if it were far away: counts what is read."""

    def __init__(self, directory: Path) -> None:
        self.name = "elsewhere"
        self.sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        self.num_bytes: Counter[str] = Counter()
        self._directory = directory

    def read(self, name: str, start: int, end: int) -> bytes:
        self.num_bytes[name] += end - start
        return (self._directory / name).read_bytes()[start:end]


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')


@pytest.mark.parametrize("num_tensors", [1, 3000], ids=["short header", "long header"])
def test_only_the_header_of_safetensors_is_read(tmp_path: Path, num_tensors: int) -> None:
    write_config(tmp_path)
    names = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(num_tensors)]
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({name: np.zeros(4 << 20 if num_tensors == 1 else 300, np.uint8) for name in names}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "model.safetensors")
    files = Elsewhere(tmp_path)
    with hollow_copy(files) as directory:
        [(path, found)] = open_directory(directory, "m").names.items()
        assert found == set(names)
        assert path.stat().st_size == files.sizes["model.safetensors"]
    assert not directory.exists()
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert files.num_bytes["model.safetensors"] == max(header, 1 << 16)
    assert files.num_bytes["tokenizer.json"] == 0


def test_only_files_named_by_the_index_are_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    for file in ("a.safetensors", "b.safetensors", "consolidated.safetensors"):
        save_file({f"model.{file[0]}.weight": np.zeros(1 << 20, np.uint8)}, tmp_path / file)
    weight_map = {f"model.{letter}.weight": f"{letter}.safetensors" for letter in "ab"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    files = Elsewhere(tmp_path)
    with hollow_copy(files) as directory:
        assert [path.name for path in open_directory(directory, "m").files] == ["a.safetensors", "b.safetensors"]
    assert files.num_bytes.keys() == {"config.json", INDEX, "a.safetensors", "b.safetensors"}


def test_a_gguf_header_is_read_to_its_end_wherever_that_is(tmp_path: Path) -> None:
    """It does not tell its length: cut anywhere, the zeros behind the cut must not pass for a part of it."""
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "m.gguf"
    for num_letters in (10, 65_000, 65_350, 65_400, 65_450, 200_000, 1_000_000):
        write_gguf(path, "llama", {"a.text": "x" * num_letters}, {"only": np.zeros((1 << 20, 1), np.float32)})
        files = Elsewhere(path.parent)
        with hollow_copy(files) as directory:
            here, there = read_gguf_header(directory / "m.gguf"), read_gguf_header(path)
        assert (here.metadata, here.tensors) == (there.metadata, there.tensors)
        assert files.num_bytes["m.gguf"] <= max(1 << 16, 2 * there.tensors[0].offset)


def test_safetensors_come_before_gguf_and_gguf_needs_no_config(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"only": np.zeros((4, 4), np.float32)})
    with hollow_copy(Elsewhere(tmp_path)) as directory:
        assert {path.name for path in directory.iterdir()} == {"m.gguf"}
    write_config(tmp_path)
    save_file({"model.norm.weight": np.zeros(4, np.uint8)}, tmp_path / "model.safetensors")
    with hollow_copy(Elsewhere(tmp_path)) as directory:
        assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("num_files", [1, 2])
def test_only_the_size_of_pickles_is_read(tmp_path: Path, num_files: int) -> None:
    write_config(tmp_path)
    write_pickles(tmp_path, {f"model.{number}.weight": torch.zeros(1 << 16) for number in range(2)}, num_files)
    files = Elsewhere(tmp_path)
    with hollow_copy(files) as directory:
        found = open_directory(directory, "m").files
        assert {path.name: path.stat().st_size for path in found} == {
            name: size for name, size in files.sizes.items() if name.endswith(".bin")
        }
    assert not any(files.num_bytes[path.name] for path in found)


def test_one_of_several_models_must_be_named(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        write_gguf(tmp_path / name, "llama", {}, {"only": np.zeros((4, 4), np.float32)})
    files = Elsewhere(tmp_path)
    with pytest.raises(ModelNotFound, match=r"several models \(q4\.gguf, q8\.gguf\)"), hollow_copy(files):
        pass
    assert not files.num_bytes


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 100, (10).to_bytes(8, "little") + b"no json"])
def test_damaged_files_are_what_their_reader_calls_them(tmp_path: Path, data: bytes) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with hollow_copy(Elsewhere(tmp_path)) as directory, pytest.raises(BadCheckpoint):
        open_directory(directory, "m")


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../x"}}']
)
def test_a_malformed_index_is_what_its_reader_calls_it(tmp_path: Path, index: str) -> None:
    write_config(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with hollow_copy(Elsewhere(tmp_path)) as directory, pytest.raises(BadCheckpoint):
        open_directory(directory, "m")


def test_a_config_that_is_too_large_is_not_fetched(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(DownloadFailed, match="more than any model's JSON file"), hollow_copy(Elsewhere(tmp_path)):
        pass

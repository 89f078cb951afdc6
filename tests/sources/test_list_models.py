from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from object_stores import BUCKET, ObjectStore

from ostro.errors import DownloadFailed, ModelNotFound
from ostro.sources.base import ObjectInfo
from ostro.sources.models import FoundModel, files_of_models, list_models

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

TREE = [
    "plain/config.json",
    "plain/model.safetensors",
    "plain/1_Pooling/config.json",
    "plain/adapter/config.json",
    "acme/tiny/config.json",
    "acme/large/config.json",
    "acme/README.md",
    "alone.gguf",
    "split-00001-of-00002.gguf",
    "split-00002-of-00002.gguf",
    "one/weights.gguf",
    "several/q4.gguf",
    "several/q8.gguf",
    "acme/packed/w-00001-of-00002.gguf",
    "acme/packed/w-00002-of-00002.gguf",
    "too/deep/by/far/config.json",
    "no model/config.json",
    ".hidden/config.json",
    "empty/notes.txt",
    "pickled/pytorch_model.bin",
]
FOUND = {
    "acme/large": "acme/large",
    "acme/packed": "acme/packed",
    "acme/tiny": "acme/tiny",
    "alone": "alone.gguf",
    "one": "one",
    "plain": "plain",
    "several/q4": "several/q4.gguf",
    "several/q8": "several/q8.gguf",
    "split": "split-00001-of-00002.gguf",
}


def expected(base: str) -> list[FoundModel]:
    return [FoundModel(name, f"{base}/{path}") for name, path in FOUND.items()]


def test_models_of_a_directory_are_found_at_one_and_two_levels(tmp_path: Path) -> None:
    for key in TREE:
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list_models(str(tmp_path)) == expected(str(tmp_path))


@pytest.mark.full
def test_models_of_a_bucket_are_found_with_one_listing(store: ObjectStore, proxy: FaultProxy) -> None:
    for key in TREE:
        store.put(f"listed/{key}", b"-")
    store.put("listed-too/other/config.json", b"-")
    base = f"{store.scheme}://{BUCKET}/listed"
    assert list_models(f"{base}/") == expected(base)
    # Google's client asks for the bucket as well, for itself.
    assert len({target for target in proxy.targets if "prefix=" in target}) == 1
    assert proxy.reads == []


def test_a_place_that_is_a_model_itself_is_that_one_model(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    (directory / "1_Pooling").mkdir(parents=True)
    (directory / "config.json").touch()
    (directory / "1_Pooling" / "config.json").touch()
    assert list_models(str(directory)) == [FoundModel("tiny", str(directory))]


def test_a_place_with_a_name_that_no_request_could_carry_is_left_out(tmp_path: Path) -> None:
    directory = tmp_path / "my model"
    directory.mkdir()
    (directory / "config.json").touch()
    assert list_models(str(directory)) == []


def test_a_link_to_itself_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    assert [model.name for model in list_models(str(tmp_path))] == ["tiny"]


def test_objects_too_deep_for_a_model_are_not_kept() -> None:
    """A checkpoint's thousands of arrays are listed too, and were all kept in memory."""

    class Bucket:
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            for key in ("acme/tiny/config.json", "acme/run/step-1/model/array/0.0", "a/b/c/d", "a/b/adapter/README.md"):
                yield ObjectInfo(prefix + key, 1, "1")

        def stat(self, key: str) -> ObjectInfo:
            raise AssertionError(key)

        def read(self, key: str, generation: str, start: int, end: int) -> Iterator[bytes]:
            raise AssertionError(key)

    assert [key for key, _ in files_of_models(Bucket(), "models/")] == ["acme/tiny/config.json"]


def test_a_place_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no directory"):
        list_models(str(tmp_path / "none"))


@pytest.mark.full
def test_a_bucket_that_is_not_there_or_not_reached_is_an_error(store: ObjectStore, proxy: FaultProxy) -> None:
    with pytest.raises(ModelNotFound, match="There is no bucket"):
        list_models(f"{store.scheme}://another-bucket/")
    proxy.close()
    with pytest.raises(DownloadFailed, match="the connection was refused"):
        list_models(f"{store.scheme}://{BUCKET}/listed/")


def test_an_empty_place_has_no_models(tmp_path: Path) -> None:
    assert list_models(str(tmp_path)) == []

"""Files for the pool: found where they are, or fetched by a process that can be ended at any time."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from model_directory import write_model
from object_stores import BUCKET, CREDENTIALS, running_store

from ostro.config import EngineConfig
from ostro.errors import DownloadFailed, ModelNotFound
from ostro.pool.catalog import ModelSpec
from ostro.server.models import files as model_files
from ostro.server.models.files import CachedModelFiles
from ostro.sources import pypi
from ostro.sources.store import ModelStore


def a_spec(reference: str | None) -> ModelSpec:
    return ModelSpec(name="it", config=EngineConfig(model=reference))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A store that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        server.settimeout(60)
        yield server


def test_what_is_on_the_disk_is_found_as_it_is(tmp_path: Path, cache: Path) -> None:
    directory = write_model(tmp_path / "tiny")
    files = asyncio.run(CachedModelFiles().find(a_spec(str(directory))))
    assert files is not None
    assert (files.path, files.name) == (str(directory), None)
    files.close()


@pytest.mark.parametrize("reference", ["gs://bucket/models/one", "pypi:llm-none==1.0", "org/name", "./nowhere"])
def test_what_is_not_here_is_not_found(reference: str, cache: Path) -> None:
    assert asyncio.run(CachedModelFiles().find(a_spec(reference))) is None


def test_wheel_in_the_cache_is_found(cache: Path) -> None:
    [wheel] = pypi.DEFAULT_MODEL.parts
    assert asyncio.run(CachedModelFiles().find(a_spec(None))) is None
    assert wheel.member is not None
    path = cache / "pypi" / f"{wheel.project}-{wheel.version}" / Path(wheel.member).name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(wheel.member_bytes)
    files = asyncio.run(CachedModelFiles().find(a_spec(None)))
    assert files is not None
    assert files.path == str(path)
    assert [entry.in_use for entry in ModelStore().entries()] == [True]
    files.close()
    assert [entry.in_use for entry in ModelStore().entries()] == [False]


@pytest.mark.full
def test_fetched_files_are_held_and_found_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_model(tmp_path / "tiny")
    with running_store("gs") as store:
        reference = store.put_model("models/org/two", {path.name: path.read_bytes() for path in directory.iterdir()})
        for name, value in store.environment(store.url).items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.INFO, "ostro"):
            files = asyncio.run(CachedModelFiles().fetch(a_spec(reference)))
        assert any(record.message.startswith(f"fetching {reference}") for record in caplog.records)
        assert files.name == "org/two"
        assert (Path(files.path) / "config.json").read_bytes() == (directory / "config.json").read_bytes()
        [entry] = ModelStore().entries()
        assert (entry.in_use, entry.path) == (True, Path(files.path))
        files.close()
        with pytest.raises(ModelNotFound, match="nothing at gs://"):
            asyncio.run(CachedModelFiles().fetch(a_spec(f"gs://{BUCKET}/models/none")))
    # Without the store.
    again = asyncio.run(CachedModelFiles().find(a_spec(reference)))
    assert again is not None
    assert (again.path, again.name) == (files.path, "org/two")
    again.close()
    assert [entry.in_use for entry in ModelStore().entries()] == [False]


@pytest.mark.full
def test_cancelled_fetch_ends_its_process(cache: Path, silent: socket.socket) -> None:
    async def scenario() -> None:
        fetch = asyncio.create_task(CachedModelFiles().fetch(a_spec("gs://bucket/models/one")))
        with closing((await asyncio.to_thread(silent.accept))[0]) as connection:
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            # The other end is gone: all that is left to read is what was asked.
            while await asyncio.to_thread(connection.recv, 1 << 16):
                pass

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_process_ends_when_nobody_listens_any_more(cache: Path, silent: socket.socket) -> None:
    process, sock = model_files._spawn(EngineConfig(model="gs://bucket/models/one"))
    with closing(silent.accept()[0]):
        sock.close()
        process.wait(30)


def test_process_that_dies_is_reported(cache: Path, silent: socket.socket) -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_eof()
        with pytest.raises(DownloadFailed, match="fetched it ended before it was done"):
            await model_files._outcome(reader, "it", lambda arrived: None)

    asyncio.run(scenario())

"""The cache on its own: models are put into it without any store."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.errors import BadRequest, DiskFull, ModelNotFound
from ostro.sources import locks
from ostro.sources.address import parse_address
from ostro.sources.cache import work_directory
from ostro.sources.checksum import crc32c_of
from ostro.sources.disk_space import cache_limit
from ostro.sources.store import FileRecord, Manifest, ModelStore


def put(store: ModelStore, name: str, size: int = 1000, age: float = 0.0) -> Path:
    """A model of one file, last used `age` seconds ago."""
    reference = parse_address(f"gs://bucket/models/{name}")
    with store.fetching(reference) as partial:
        files = partial / "files"
        files.mkdir(parents=True, exist_ok=True)
        (files / "weights").write_bytes(name.encode()[:1] * size)
        record = FileRecord(size, crc32c_of(files / "weights"), "1")
        target = store.place(reference, "v1")
        store.publish(files, target, Manifest(str(reference), reference.name, time.time(), {"weights": record}))
        shutil.rmtree(partial)
    moment = time.time() - age
    os.utime(target, (moment, moment))
    return target


def names(store: ModelStore) -> list[str]:
    return [entry.name for entry in store.entries()]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


# --- room -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(store: ModelStore) -> None:
    for age, name in enumerate("abc"):
        put(store, name, age=100 - age)
    store.touch(store.entries()[0].path)
    store.make_room(1000, limit=3000)
    assert names(store) == ["c", "a"]


def test_a_model_in_use_stays_however_old(store: ModelStore) -> None:
    paths = [put(store, name, age=100 - age) for age, name in enumerate("abc")]
    with store.hold(paths[0] / "weights"):
        os.utime(paths[0], (0, 0))
        assert [entry.in_use for entry in store.entries()] == [True, False, False]
        store.make_room(1000, limit=3000)
        assert set(names(store)) == {"a", "c"}
        with pytest.raises(DiskFull, match=r"OSTRO_CACHE_LIMIT allows, and models in use and active downloads"):
            store.make_room(2500, limit=3000)
        assert set(names(store)) == {"a", "c"}
    store.make_room(2500, limit=3000)
    assert names(store) == []


@settings(max_examples=examples(15))
@given(
    models=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=6),
    needed=st.integers(0, 200),
    limit=st.integers(0, 250),
)
def test_making_room_evicts_the_oldest_idle_ones_or_nothing(
    models: Sequence[tuple[int, bool]], needed: int, limit: int
) -> None:
    with TemporaryDirectory() as directory, ExitStack() as stack:
        store = ModelStore(Path(directory))
        for number, (size, held) in enumerate(models):
            path = put(store, f"m{number}", size)
            if held:
                stack.enter_context(store.hold(path))
            os.utime(path, (number, number))
        total, in_use = sum(size for size, _ in models), sum(size for size, held in models if held)
        idle = [f"m{number}" for number, (_, held) in enumerate(models) if not held]
        try:
            store.make_room(needed, limit)
        except DiskFull:
            assert in_use + needed > limit
            assert len(store.entries()) == len(models)
            return
        left = {entry.name: entry.size for entry in store.entries()}
        evicted = [name for name in idle if name not in left]
        assert sum(left.values()) + needed <= limit or (total + needed <= limit and not evicted)
        assert evicted == idle[: len(evicted)]
        assert len(left) + len(evicted) == len(models)
        # The last one to go was needed.
        if evicted:
            last = models[int(evicted[-1][1:])][0]
            assert sum(left.values()) + last + needed > limit


def test_without_a_limit_only_a_full_disk_evicts(store: ModelStore) -> None:
    put(store, "a")
    store.make_room(1000)
    assert names(store) == ["a"]
    with pytest.raises(DiskFull, match="MB are needed"):
        store.make_room(1 << 60)
    assert names(store) == ["a"]


@pytest.mark.parametrize(
    ("text", "size"), [("50G", 50 << 30), ("1.5TiB", 3 << 39), ("800mb", 800 << 20), ("7", 7), ("", None)]
)
def test_a_limit_is_written_with_a_unit(text: str, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", text)
    assert cache_limit() == size


@pytest.mark.parametrize("text", ["much", "-1", "50 parsecs", "1e9"])
def test_an_invalid_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", text)
    with pytest.raises(BadRequest, match=r"is not a size\. Write 50G"):
        cache_limit()


def test_a_download_that_nobody_goes_on_with_makes_room_before_a_model_does(store: ModelStore) -> None:
    put(store, "a", 10_000)
    partial = store.objects / "other-0123.partial" / "files"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(bytes(100_000))
    store.make_room(10_000, limit=30_000)
    assert names(store) == ["a"]
    assert not partial.exists()


def test_request_for_impossible_room_deletes_nothing(store: ModelStore) -> None:
    put(store, "a")
    partial = store.objects / "other-0123.partial" / "files"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(bytes(1000))
    with pytest.raises(DiskFull):
        store.make_room(1 << 60)
    with pytest.raises(DiskFull):
        store.make_room(1000, limit=999)
    assert names(store) == ["a"]
    assert partial.exists()


def test_a_file_with_two_names_counts_once_and_goes_with_both(store: ModelStore) -> None:
    paths = [put(store, name, age=100 - age) for age, name in enumerate("ab")]
    (paths[1] / "weights").unlink()
    (paths[1] / "weights").hardlink_to(paths[0] / "weights")
    store.make_room(1000, limit=2000)
    assert names(store) == ["a", "b"]
    put(store, "c")
    # The oldest alone would free nothing.
    store.make_room(500, limit=2000)
    assert names(store) == ["c"]


def test_a_file_that_is_also_in_use_elsewhere_makes_no_room(store: ModelStore) -> None:
    paths = [put(store, name, age=100 - age) for age, name in enumerate("ab")]
    (paths[1] / "weights").unlink()
    (paths[1] / "weights").hardlink_to(paths[0] / "weights")
    with store.hold(paths[1]), pytest.raises(DiskFull):
        store.make_room(500, limit=1400)
    assert set(names(store)) == {"a", "b"}


def test_a_download_under_way_counts_as_large_as_it_will_be(store: ModelStore) -> None:
    reference = parse_address("gs://bucket/models/a")
    with store.fetching(reference) as partial:
        partial.mkdir()
        with (partial / "weights").open("wb") as file:
            file.truncate(1 << 20)
        with pytest.raises(DiskFull, match="active downloads cannot be evicted"):
            store.make_room(1, limit=1 << 20)
    # Nobody goes on with it now, and it is all hole.
    store.make_room(1, limit=1 << 20)
    assert partial.exists()


# --- use ------------------------------------------------------------------------------------------------------------


def test_a_hold_of_another_process_counts_until_it_dies(store: ModelStore) -> None:
    path = put(store, "a")
    program = "import sys; from pathlib import Path; from ostro.sources.store import ModelStore\n"
    program += (
        "held = ModelStore(Path(sys.argv[1])).hold(Path(sys.argv[2])); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(store.root), str(path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(BadRequest, match="is in use"):
            store.remove(path)
    finally:
        process.kill()
        process.communicate()
    store.remove(path)
    assert names(store) == []


def test_a_path_outside_the_cache_needs_no_hold(store: ModelStore, tmp_path: Path) -> None:
    with store.hold(tmp_path):
        pass
    with store.hold(tmp_path / "none"):
        pass


def test_a_model_that_went_before_it_was_held_is_called_gone(store: ModelStore) -> None:
    path = put(store, "a")
    store.remove(path)
    with pytest.raises(ModelNotFound, match="no longer in the cache"):
        store.hold(path)


def test_holding_a_model_counts_as_use(store: ModelStore) -> None:
    path = put(store, "a", age=1000)
    put(store, "b", age=500)
    store.hold(path).close()
    assert names(store) == ["b", "a"]


def test_the_last_use_is_when_a_hold_ends(store: ModelStore) -> None:
    """It was when it began, so that what had been served all day went before what was tried once."""
    path = put(store, "a")
    with store.hold(path):
        os.utime(path, (1, 1))
        os.utime(put(store, "b"), (2, 2))
    assert names(store) == ["b", "a"]


def test_held_model_counts_as_used_throughout(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed ends no hold."""
    monkeypatch.setattr(locks, "_TOUCH_SECONDS", 0.01)
    path = put(store, "a")
    with store.hold(path):
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 30
        while path.stat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_removed_model_is_not_reported_as_in_use(store: ModelStore) -> None:
    path = put(store, "a")
    store.remove(path)
    with pytest.raises(ModelNotFound, match="no longer in the cache"):
        store.remove(path)


def test_a_damaged_model_in_use_is_not_replaced_under_its_user(store: ModelStore) -> None:
    path = put(store, "a")
    with store.hold(path):
        (path / "weights").unlink()
        inode = path.stat().st_ino
        with pytest.raises(BadRequest, match="is in use"):
            put(store, "a")
        assert path.stat().st_ino == inode
    put(store, "a")
    assert store.is_whole(path)


def test_concurrent_removals_of_one_name_do_not_collide(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first leaves for a while stood in the way of the second, in the same process."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    reference = parse_address("gs://bucket/models/a")
    for _ in range(2):
        target = store.place(reference, "v1")
        target.mkdir(parents=True)
        (target / "weights").touch()
        store.remove(target)
    assert len(list(store.objects.glob("*.removing"))) == 2


def test_a_model_that_goes_while_all_are_listed_is_passed_over(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(store, "a")
    put(store, "b")
    manifest = ModelStore.manifest

    def manifest_then_lose(models: ModelStore, directory: Path) -> Manifest | None:
        found = manifest(models, directory)
        if directory == path:
            models.remove(path)
        return found

    monkeypatch.setattr(ModelStore, "manifest", manifest_then_lose)
    assert names(store) == ["b"]


def test_a_wheels_model_is_listed_held_and_removed_too(store: ModelStore) -> None:
    path = store.wheels / "llm-tiny-1.0" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(5000))
    (store.wheels / "llm-tiny-1.0.lock").touch()
    (store.wheels / "llm-other-2.0.partial").mkdir()
    [entry] = store.entries()
    assert (entry.name, entry.reference, entry.manifest) == ("llm-tiny", "pypi:llm-tiny==1.0", None)
    with store.hold(path), pytest.raises(BadRequest, match="is in use"):
        store.remove(entry.path)
    store.remove(entry.path)
    assert store.entries() == []


# --- damage ---------------------------------------------------------------------------------------------------------


def test_verify_reports_what_is_wrong_with_which_file(store: ModelStore) -> None:
    path = put(store, "a")
    [entry] = store.entries()
    assert store.verify(entry) == []
    crc32c = crc32c_of(path / "weights")
    weights = bytearray((path / "weights").read_bytes())
    weights[500] ^= 1
    (path / "weights").write_bytes(weights)
    assert store.verify(entry) == ["weights is damaged: its CRC32C is not " + crc32c]
    (path / "weights").write_bytes(b"short")
    assert store.verify(entry) == ["weights has 5 bytes instead of 1000"]
    (path / "weights").unlink()
    assert store.verify(entry) == ["weights is missing"]


def test_a_model_with_a_damaged_manifest_is_not_used_but_listed(store: ModelStore) -> None:
    path = put(store, "a")
    (path / ".ostro.json").write_text("{")
    assert store.find(parse_address("gs://bucket/models/a")) is None
    [entry] = store.entries()
    assert store.verify(entry) == ["its manifest is damaged"]


def test_sweeping_leaves_downloads_that_are_young_or_under_way(store: ModelStore) -> None:
    reference = parse_address("gs://bucket/models/a")
    with store.fetching(reference) as busy:
        busy.mkdir()
        old, young = store.objects / "old-1.partial", store.objects / "young-1.partial"
        doomed = store.objects / "b-1@v1.77.removing"
        for each in (old, young, doomed):
            each.mkdir()
        for each in (old, busy):
            os.utime(each, (0, 0))
        store.sweep()
        assert [each.exists() for each in (busy, young, old, doomed)] == [True, True, False, False]


def test_sweeping_clears_wheels_that_nobody_fetches(store: ModelStore) -> None:
    """They are never gone on with, unless pieces of a model were put together there."""
    store.sweep()
    assert not store.root.exists()
    with work_directory(store.wheels / "busy-1.0") as busy:
        stale, doomed = store.wheels / "stale-1.0.partial", store.wheels / "tiny-1.0.77.removing"
        pieces = store.wheels / "pieces-1.0.partial"
        for each in (stale, doomed, pieces):
            each.mkdir()
        (pieces / "model.gguf").write_bytes(b"a piece")
        store.sweep()
        assert [each.exists() for each in (busy, stale, doomed, pieces)] == [True, False, False, True]

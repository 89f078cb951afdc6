import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.sources import partial as module
from ostro.sources.base import ObjectInfo, Transient
from ostro.sources.partial import Partial

BLOCK, COUNT = 4, 6
DATA = bytes(range(BLOCK * COUNT - 1))
INFO = ObjectInfo("models/tiny/a.json", len(DATA), "1")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


def opened(directory: Path, info: ObjectInfo = INFO) -> Partial:
    partial = Partial(directory)
    partial.prepare({"a.json": info})
    return partial


def write(partial: Partial, number: int, info: ObjectInfo = INFO) -> None:
    start, end = number * BLOCK, min((number + 1) * BLOCK, len(DATA))
    list(partial.write("a.json", info, (start, end), [DATA[start:end]]))


@settings(max_examples=examples(40))
@given(numbers=st.lists(st.integers(0, COUNT - 1), unique=True), lost=st.integers(0, 400))
def test_whatever_is_lost_of_the_journal_no_range_is_believed_that_did_not_arrive(
    numbers: list[int], lost: int
) -> None:
    with TemporaryDirectory() as directory:
        partial = opened(Path(directory))
        for number in numbers:
            write(partial, number)
        journal = Path(directory) / "journal"
        journal.write_bytes(journal.read_bytes()[: max(0, journal.stat().st_size - lost)])
        again = opened(Path(directory))
        missing = {start // BLOCK for start, _ in again.missing("a.json", INFO)}
        assert missing >= set(range(COUNT)) - set(numbers)
        if lost == 0:
            assert missing == set(range(COUNT)) - set(numbers)
        for number in missing:
            write(again, number)
        assert again.missing("a.json", INFO) == []
        assert (again.files / "a.json").read_bytes() == DATA


def test_after_a_loss_of_power_no_range_is_believed_that_was_not_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have kept any part of what was not synced: here, all of the journal and none of the files."""
    on_disk: dict[int, bytes] = {}
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        inode = os.fstat(descriptor).st_ino
        [path] = [path for path in tmp_path.rglob("*") if path.stat().st_ino == inode]
        on_disk[inode] = path.read_bytes()

    monkeypatch.setattr(os, "fsync", fsync)
    partial = opened(tmp_path)
    for number in range(COUNT):
        write(partial, number)
        believed = set(range(COUNT)) - {start // BLOCK for start, _ in opened(tmp_path).missing("a.json", INFO)}
        kept = on_disk.get((partial.files / "a.json").stat().st_ino, b"")
        assert all(
            kept[each * BLOCK : (each + 1) * BLOCK] == DATA[each * BLOCK : (each + 1) * BLOCK] for each in believed
        )
    # Nor may another file of the same name be taken for the one that was given up.
    partial.forget("a.json")
    assert on_disk[(tmp_path / "journal").stat().st_ino] == (tmp_path / "journal").read_bytes()


def test_another_generation_starts_from_nothing(tmp_path: Path) -> None:
    write(opened(tmp_path), 0)
    newer = ObjectInfo(INFO.key, INFO.size, "2")
    assert len(opened(tmp_path, newer).missing("a.json", newer)) == COUNT
    # Back again, as when a bucket is rolled back: what was there of it is gone with the file.
    assert len(opened(tmp_path).missing("a.json", INFO)) == COUNT


def test_files_that_are_no_longer_wanted_go(tmp_path: Path) -> None:
    write(opened(tmp_path), 0)
    partial = Partial(tmp_path)
    partial.prepare({"b.json": INFO})
    assert [path.name for path in partial.files.iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    ("pieces", "reason"), [([b"abc"], "ended 1 bytes early"), ([b"abc", b"de"], "more bytes arrived")]
)
def test_a_range_of_the_wrong_length_is_not_recorded(tmp_path: Path, pieces: list[bytes], reason: str) -> None:
    partial = opened(tmp_path)
    with pytest.raises(Transient, match=reason):
        list(partial.write("a.json", INFO, (0, BLOCK), pieces))
    assert len(opened(tmp_path).missing("a.json", INFO)) == COUNT


def test_forgetting_an_adopted_file_leaves_the_original(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(DATA)
    partial = opened(tmp_path / "partial")
    partial.adopt("a.json", INFO, original)
    assert partial.missing("a.json", INFO) == []
    partial.forget("a.json")
    partial.prepare({"a.json": INFO})
    write(partial, 0)
    assert original.read_bytes() == DATA


def test_an_empty_file_is_whole_at_once(tmp_path: Path) -> None:
    empty = ObjectInfo("a", 0, "1")
    partial = opened(tmp_path, empty)
    assert partial.missing("a.json", empty) == []
    assert (partial.files / "a.json").read_bytes() == b""

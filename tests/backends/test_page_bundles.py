"""Bundles of pages that engines leave to one another: whatever happens to them, a page is right or it is not there."""

import logging
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostro.backends.tiers.page_bundles import PageBundles
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import Bytes, PageFileUnusable, file_bytes, open_page_file

IDENTITY = b"a model".ljust(32, b"\0")
PAGE = 1000


def page(number: int) -> Bytes:
    return np.full(PAGE, number, np.uint8)


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def bundles(directory: Path, *, identity: bytes = IDENTITY, num_pages: int = 100) -> PageBundles:
    return PageBundles(directory, identity=identity, page_bytes=PAGE, limit=file_bytes(num_pages, PAGE))


def written(directory: Path, *numbers: int, num_pages: int = 100) -> Path:
    """The path of the new bundle."""
    made = bundles(directory, num_pages=num_pages)
    before = set(paths(directory))
    assert made.write([(digest(number), page(number)) for number in numbers]) == len(numbers)
    made.close()
    [path] = set(paths(directory)) - before
    return path


def paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.pages"))


def right(made: PageBundles, *numbers: int) -> list[int]:
    into = np.zeros(PAGE, np.uint8)
    good = [number for number in numbers if made.read(digest(number), into.data) and (into == number).all()]
    made.close()
    return good


def looked(made: PageBundles) -> PageBundles:
    made.look(thoroughly=True)
    return made


def test_pages_left_by_one_engine_are_found_by_another(tmp_path: Path) -> None:
    other = bundles(tmp_path)
    written(tmp_path, 1, 2, 3)
    assert not other.holds(digest(1))
    looked(other)
    assert [other.holds(digest(number)) for number in (1, 3, 4)] == [True, True, False]
    assert len(other) == 3
    assert right(other, 1, 2, 3, 4) == [1, 2, 3]


def test_the_directory_is_found_to_have_changed_by_itself(tmp_path: Path) -> None:
    other = bundles(tmp_path)
    for number in range(20):
        written(tmp_path, number)
        other.look()
        assert other.holds(digest(number))


def test_bundles_of_other_models_and_settings_are_ignored(tmp_path: Path) -> None:
    written(tmp_path, 1)
    other = bundles(tmp_path, identity=b"another".ljust(32, b"\0"))
    assert len(other) == 0
    path = written(tmp_path, 2)
    path.rename(tmp_path / b"another".ljust(32, b"\0").hex() / path.name)
    assert len(looked(other)) == 0


def test_the_oldest_bundles_make_room(tmp_path: Path) -> None:
    for number in range(0, 20, 2):
        written(tmp_path, number, number + 1, num_pages=9)
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= file_bytes(9, PAGE)
    assert right(bundles(tmp_path), *range(20)) == [16, 17, 18, 19]


def test_a_bundle_that_is_gone_is_a_miss_and_forgotten(tmp_path: Path) -> None:
    path = written(tmp_path, 1, 2)
    reader = bundles(tmp_path)
    path.unlink()
    assert right(reader, 1) == []
    assert not reader.holds(digest(1))
    assert len(looked(reader)) == 0


def test_more_pages_than_fit_are_cut_off(tmp_path: Path) -> None:
    made = bundles(tmp_path, num_pages=3)
    assert made.write([(digest(number), page(number)) for number in range(5)]) == 3
    assert right(made, *range(5)) == [0, 1, 2]
    assert bundles(tmp_path, num_pages=0).write([(digest(1), page(1))]) == 0


def test_a_page_that_is_offered_twice_is_found_though_one_bundle_goes(tmp_path: Path) -> None:
    first = written(tmp_path, 1, 2)
    written(tmp_path, 1, 3)
    reader = bundles(tmp_path)
    first.unlink()
    looked(reader)
    assert right(reader, 1, 2, 3) == [1, 3]


def test_leftovers_of_a_dead_writer_are_removed_later(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    fresh, old = path.with_name(f"{'1' * 24}.part"), path.with_name(f"{'2' * 24}.part")
    for each in (fresh, old):
        each.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    written(tmp_path, 2)
    assert (fresh.exists(), old.exists()) == (True, False)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_bundle_is_a_miss(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("bundles")
    path = written(directory, 1, 2, 3)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole[:cut])
    if at < cut:
        damaged[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    reader, into = bundles(directory), np.zeros(PAGE, np.uint8)
    for number in (1, 2, 3):
        if reader.holds(digest(number)) and reader.read(digest(number), into.data):
            assert (into == number).all()
    reader.close()


def test_files_that_others_could_have_written_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, 1)
    path.chmod(0o666)
    link = path.with_name(f"{'1' * 24}.pages")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(written(tmp_path / "other", 2).read_bytes())
    link.symlink_to(elsewhere)
    os.mkfifo(path.with_name(f"{'2' * 24}.pages"))
    assert len(bundles(tmp_path)) == 0
    assert "can be written by other users" in caplog.text
    assert "is not a regular file" in caplog.text


def test_names_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    others = [path.with_name(name) for name in ("download.part", "model.pages", "\udcff.pages")]
    for each in others:
        each.touch()
        os.utime(each, (0, 0))
    assert len(bundles(tmp_path)) == 1
    written(tmp_path, 2, num_pages=1)
    assert all(each.exists() for each in others)


@pytest.mark.parametrize("trick", ["link", "mode"])
def test_a_directory_that_others_could_have_made_is_refused(tmp_path: Path, trick: str) -> None:
    directory = written(tmp_path, 1).parent
    if trick == "mode":
        directory.chmod(0o777)
    else:
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PageFileUnusable, match="cannot take pages"):
        bundles(tmp_path)


def test_one_bundle_that_cannot_be_read_hides_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those behind it, nor itself once it can be."""
    reader = bundles(tmp_path)
    bad, *_ = sorted(written(tmp_path, number) for number in (1, 2, 3))
    opened = os.open

    def refusing(path: str, *args: int, **kwargs: int) -> int:
        if path == bad.name:
            raise OSError(24, "Too many open files")
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        assert len(looked(reader)) == 2
    assert len(looked(reader)) == 3


def test_a_damaged_bundle_is_removed_so_that_its_pages_can_be_shared_again(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[4096 + 500] ^= 1
    path.write_bytes(content)
    reader = bundles(tmp_path)
    assert reader.holds(digest(1))
    assert right(reader, 1) == []
    assert not path.exists()


def test_a_directory_that_was_emptied_is_used_again(tmp_path: Path) -> None:
    made = bundles(tmp_path)
    shutil.rmtree(made.directory)
    assert made.write([(digest(1), page(1))]) == 1
    assert right(bundles(tmp_path), 1) == [1]


def test_bundles_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PageFileUnusable, match="cannot take pages"):
        bundles(tmp_path / "file")


def test_a_full_disk_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = bundles(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        for _ in range(3):
            assert made.write([(digest(1), page(1))]) == 0
    assert caplog.text.count("No space left on device") == 1
    assert [path.name for path in tmp_path.glob("*/*")] == []
    assert made.write([(digest(1), page(1))]) == 1


# ---- behind the thread that reads and writes


def offer(disk: PageDisk, *numbers: int) -> int:
    disk.offer(7, [(digest(number), page(number)) for number in numbers])
    [ended] = disk.ended(timeout=30)
    assert ended.ticket == 7
    return ended.num_good


def test_a_disk_reads_its_own_pages_and_those_of_others_in_one_go(tmp_path: Path) -> None:
    written(tmp_path, 2)
    file = open_page_file(tmp_path, None, identity=IDENTITY, page_bytes=PAGE, limit=file_bytes(8, PAGE))
    disk = PageDisk(file, bundles(tmp_path))
    disk.write(digest(1), lambda: page(1))
    assert (disk.holds(digest(1)), disk.is_shared(digest(1))) == (True, False)
    assert (disk.holds(digest(2)), disk.is_shared(digest(2))) == (True, True)
    into = [np.zeros(PAGE, np.uint8) for _ in range(3)]
    disk.read(1, [digest(1), digest(2), digest(3)], into)
    [ended] = disk.ended(timeout=30)
    assert ended.num_good == 2
    assert [int(each[0]) for each in into] == [1, 2, 0]
    disk.close()


def test_without_a_file_of_its_own_a_disk_keeps_what_is_offered_alone(tmp_path: Path) -> None:
    disk = PageDisk(None, bundles(tmp_path))
    disk.write(digest(1), lambda: page(1))
    assert not disk.holds(digest(1))
    assert offer(disk, 2, 3) == 2
    assert disk.is_shared(digest(3))
    disk.close([(digest(number), lambda number=number: page(number)) for number in (3, 4)], outlives=True)  # type: ignore[misc]
    assert right(bundles(tmp_path), 1, 2, 3, 4) == [2, 3, 4]
    assert len(paths(tmp_path)) == 2


def test_look_reports_when_it_has_seen_everything(tmp_path: Path) -> None:
    disk = PageDisk(None, bundles(tmp_path))
    for number in range(10):
        written(tmp_path, number)
        seen = threading.Event()
        disk.look(seen.set)
        assert seen.wait(30)
        assert disk.holds(digest(number))
    disk.close()


def test_a_directory_that_cannot_be_read_is_logged_once_and_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = bundles(tmp_path)
    disk = PageDisk(None, made)
    # Others could write there now.
    made.directory.chmod(0o777)

    def look() -> None:
        seen = threading.Event()
        disk.look(seen.set)
        assert seen.wait(30)

    with caplog.at_level(logging.WARNING):
        look()
        look()
        assert offer(disk, 1) == 0
    assert caplog.text.count("prefixes of other engines are not found") == 1
    made.directory.chmod(0o700)
    written(tmp_path, 2)
    look()
    assert disk.holds(digest(2))
    disk.close()


def test_a_disk_that_is_never_idle_finds_new_bundles_all_the_same(tmp_path: Path) -> None:
    """It once looked only when it had nothing else to do."""
    file = open_page_file(tmp_path, None, identity=IDENTITY, page_bytes=PAGE, limit=file_bytes(8, PAGE))
    disk = PageDisk(file, bundles(tmp_path))
    written(tmp_path, 1)
    while not disk.holds(digest(1)):
        disk.write(digest(2), lambda: page(2))
        time.sleep(0.01)
    disk.close()

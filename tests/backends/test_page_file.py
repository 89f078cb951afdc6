"""Pages on disk: whatever happens to the file, a page is right or it is not there."""

import errno
import logging
import os
import stat
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import Bytes, PageFile, PageFileUnusable, open_page_file

IDENTITY = b"a model".ljust(32, b"\0")
PAGE = 1000
LIMIT = 8 * 2**10 + 4096


def page(number: int) -> Bytes:
    return np.full(PAGE, number, np.uint8)


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def opened(
    directory: Path, name: str | None = "model.pages", *, identity: bytes = IDENTITY, limit: int = LIMIT
) -> PageFile:
    return open_page_file(directory, name, identity=identity, page_bytes=PAGE, limit=limit)


def written(directory: Path, *numbers: int, limit: int = LIMIT) -> None:
    disk = PageDisk(opened(directory, limit=limit))
    for number in numbers:
        disk.write(digest(number), lambda number=number: page(number))  # type: ignore[misc]
    disk.close()


def read(disk: PageDisk, *numbers: int) -> list[int]:
    """Which pages are right, from the first on. Waits for an answer, which must come."""
    into = [np.zeros(PAGE, np.uint8) for _ in numbers]
    disk.read(1, [digest(number) for number in numbers], into)
    [ended] = disk.ended(timeout=30)
    good = list(numbers[: ended.num_good])
    assert all((got == number).all() for got, number in zip(into, good, strict=False))
    return good


def found(directory: Path, *numbers: int, identity: bytes = IDENTITY, limit: int = LIMIT) -> list[int]:
    disk = PageDisk(opened(directory, identity=identity, limit=limit))
    good = [number for number in numbers if disk.holds(digest(number)) and read(disk, number)]
    disk.close()
    return good


def test_pages_are_found_again_by_the_next_process(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    assert found(tmp_path, 1, 2, 3, 4) == [1, 2, 3]


def test_a_page_can_be_read_while_it_waits_to_be_written(tmp_path: Path) -> None:
    disk = PageDisk(opened(tmp_path))
    disk.write(digest(1), lambda: page(1))
    assert read(disk, 1) == [1]
    disk.close()


def test_a_file_without_a_name_is_gone_with_its_process(tmp_path: Path) -> None:
    disk = PageDisk(opened(tmp_path, None))
    disk.write(digest(1), lambda: page(1))
    assert read(disk, 1) == [1]
    assert list(tmp_path.iterdir()) == []
    disk.close()


def test_the_oldest_pages_make_room_and_the_file_stays_within_its_limit(tmp_path: Path) -> None:
    numbers = list(range(20))
    written(tmp_path, *numbers)
    assert found(tmp_path, *numbers) == numbers[-7:]
    assert (tmp_path / "model.pages").stat().st_size <= LIMIT


def test_reading_a_page_makes_it_the_most_recent(tmp_path: Path) -> None:
    disk = PageDisk(opened(tmp_path))
    for number in range(7):
        disk.write(digest(number), lambda number=number: page(number))  # type: ignore[misc]
    assert read(disk, 0) == [0]
    disk.write(digest(9), lambda: page(9))
    assert [disk.holds(digest(number)) for number in (0, 1, 9)] == [True, False, True]
    disk.close()


def test_final_writes_keep_the_most_recent_pages_longest(tmp_path: Path) -> None:
    disk = PageDisk(opened(tmp_path))
    disk.write_all([(digest(number), lambda number=number: page(number)) for number in range(9)])  # type: ignore[misc]
    disk.close()
    assert found(tmp_path, *range(9)) == [0, 1, 2, 3, 4, 5, 6]
    written(tmp_path, 20)
    assert found(tmp_path, *range(9), 20) == [0, 1, 2, 3, 4, 5, 20]


def test_pages_in_use_at_shutdown_stay_on_disk(tmp_path: Path) -> None:
    """A system prompt that memory held all day was once the oldest on disk, and made room for the last conversation."""
    written(tmp_path, 1, 2, 3, 4, 5, 6, 7)
    disk = PageDisk(opened(tmp_path))
    for number in range(1, 8):
        assert read(disk, number) == [number]
    asked: list[int] = []

    def bytes_of(number: int) -> Bytes:
        asked.append(number)
        return page(number)

    disk.write_all([(digest(number), partial(bytes_of, number)) for number in (1, 2, 20, 21)])
    disk.close()
    assert asked == [20, 21]
    assert found(tmp_path, *range(1, 8), 20, 21) == [1, 2, 5, 6, 7, 20, 21]


def test_a_smaller_limit_cuts_the_file(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3, 4)
    smaller = 4096 + 2 * (PAGE + 128)
    assert len(found(tmp_path, 1, 2, 3, 4, limit=smaller)) == 2
    assert (tmp_path / "model.pages").stat().st_size <= smaller


def test_a_limit_below_a_page_holds_nothing(tmp_path: Path) -> None:
    written(tmp_path, 1, limit=100)
    assert found(tmp_path, 1) == []


def test_another_models_file_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, 1)
    assert found(tmp_path, 1, identity=b"another".ljust(32, b"\0")) == []
    assert found(tmp_path, 1) == []


def test_a_page_is_a_miss_after_one_that_is_lost(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    disk = PageDisk(opened(tmp_path))
    assert read(disk, 1, 9, 3) == [1]
    disk.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_makes_a_wrong_page(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.pages"
    path.unlink(missing_ok=True)
    written(tmp_path, 1, 2, 3)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(["flip", "cut", "copy", "fill"])):
            case "flip" if content:
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[data.draw(st.integers(0, len(content))) :]
            case "copy":
                # One record's page under another's digest.
                stride = PAGE + 128
                content[4096 + stride + 128 : 4096 + 2 * stride] = content[4096 + 128 : 4096 + stride]
            case _:
                content += os.urandom(data.draw(st.integers(0, 4000)))
    path.write_bytes(content)
    # `read` asserts that what it calls good is what was written.
    disk = PageDisk(opened(tmp_path))
    for number in (1, 2, 3):
        read(disk, number)
    disk.write(digest(4), lambda: page(4))
    assert read(disk, 4) == [4]
    disk.close()
    assert found(tmp_path, 1, 2, 3, 4)[-1:] == [4]


def test_a_record_of_erased_flash_is_not_a_page_and_others_are_written_after_it(tmp_path: Path) -> None:
    """Its order, the largest number there is, once ended the thread that writes, and then every read waited."""
    written(tmp_path, 1, 2, 3)
    with (tmp_path / "model.pages").open("r+b") as file:
        file.seek(4096 + PAGE + 128)
        file.write(b"\xff" * (PAGE + 128))
    disk = PageDisk(opened(tmp_path))
    assert len(disk) == 2
    disk.write(digest(9), lambda: page(9))
    assert [read(disk, number) for number in (9, 1, 2, 3)] == [[9], [1], [], [3]]
    disk.close()
    assert found(tmp_path, 1, 2, 3, 9) == [1, 3, 9]


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_no_failure_ends_the_thread_that_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fails(*_: object) -> int:
        raise ValueError("something unforeseen")

    disk = PageDisk(opened(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(os, call, fails)
        disk.write(digest(1), lambda: page(1))
        assert read(disk, 1) == []
    assert read(disk, 1) == []
    disk.close()


@pytest.mark.parametrize("content", [b"", b"no pages", bytes(10_000), b"\xff" * 10_000])
def test_invalid_page_file_is_recreated(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pages"
    path.write_bytes(content)
    path.chmod(0o600)
    assert found(tmp_path, 1) == []
    written(tmp_path, 1)
    assert found(tmp_path, 1) == [1]


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    written(tmp_path, 1)
    assert stat.S_IMODE((tmp_path / "model.pages").stat().st_mode) == 0o600


def test_a_file_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    written(tmp_path, 1)
    (tmp_path / "model.pages").chmod(0o666)
    with pytest.raises(PageFileUnusable, match="can be written by other users"):
        opened(tmp_path)


def test_a_file_that_others_could_read_is_its_owners_alone_from_then_on(tmp_path: Path) -> None:
    written(tmp_path, 1)
    (tmp_path / "model.pages").chmod(0o644)
    assert found(tmp_path, 1) == [1]
    assert stat.S_IMODE((tmp_path / "model.pages").stat().st_mode) == 0o600


def test_a_file_with_another_name_is_neither_used_nor_cut(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("something else")
    os.link(precious, tmp_path / "model.pages")
    with pytest.raises(PageFileUnusable, match="more than one hard link"):
        opened(tmp_path)
    assert precious.read_text() == "something else"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "model.pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PageFileUnusable, match="cannot take pages"):
        opened(tmp_path)


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    file = opened(tmp_path)
    with pytest.raises(PageFileUnusable, match="in use by another process"):
        opened(tmp_path)
    file.close()
    opened(tmp_path).close()


def test_a_full_disk_is_one_line_in_the_log_and_then_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = PageDisk(opened(tmp_path))
    disk.write(digest(1), lambda: page(1))
    assert read(disk, 1) == [1]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with caplog.at_level(logging.WARNING):
        for number in range(2, 6):
            disk.write(digest(number), lambda number=number: page(number))  # type: ignore[misc]
        assert read(disk, 2) == []
    assert read(disk, 1) == [1]
    disk.close()
    assert [record.message for record in caplog.records if "no more pages" in record.message] == [
        "no more pages are written to disk: [Errno 28] No space left on device. Free some space, and restart."
    ]


def test_pages_are_dropped_while_too_many_wait_to_be_written(tmp_path: Path) -> None:
    file = opened(tmp_path)
    disk = PageDisk(file)
    disk._room = type(disk._room)(0)
    disk.write(digest(1), lambda: page(1))
    assert not disk.holds(digest(1))
    disk.close()

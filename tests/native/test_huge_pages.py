"""Packed weights in huge pages: a copy gives the same tokens as the mapped file, and nothing else changes."""

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest
from native_directory import generate, load, packed_files, write
from native_models import needs_library

from ostro.backends.native import load as native_load
from ostro.backends.native import runner as native_runner
from ostro.backends.native.runner import NativeRunner
from ostro.kernels.cpu import huge_pages, packed_file
from ostro.kernels.cpu.huge_pages import HUGE, copied, count, setting
from ostro.kernels.cpu.packed_file import PackedFile

pytestmark = [
    needs_library,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux has huge pages to ask for"),
]


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose system has huge pages, whether or not this one's does, and where small files are worth them."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "_LEAST_HUGE", 0)
    monkeypatch.setattr(huge_pages, "are_there", lambda: True)


def _weights(runner: object) -> PackedFile:
    assert isinstance(runner, NativeRunner)
    return runner.program._packed


def test_a_copy_gives_the_same_tokens_as_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory = write(tmp_path / "model")
    mapped = load(directory, huge_pages="off")
    assert "in huge pages" not in caplog.text
    copy = load(directory, huge_pages="always")
    assert "MiB in huge pages, in a copy" in caplog.text
    assert (_weights(mapped).is_copied, _weights(copy).is_copied) == (False, True)
    assert generate(copy) == generate(mapped)
    # A second one beside the first, and one after the first is gone.
    second = load(directory, huge_pages="always")
    del copy
    assert generate(second) == generate(load(directory)) == generate(mapped)
    assert len(packed_files()) == 1


def test_a_copy_made_where_the_weights_were_just_packed(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    first = load(directory, huge_pages="always")
    assert _weights(first).is_copied
    assert generate(first) == generate(load(directory, huge_pages="off"))


def test_a_copy_has_the_files_bytes_and_needs_the_file_no_more(tmp_path: Path) -> None:
    load(write(tmp_path / "model"))
    [path] = packed_files()
    content = path.read_bytes()
    with path.open("rb") as file:
        key = packed_file._checked(file, path).key
    weights = PackedFile.open(path, key=key)
    weights.take_huge_pages(weights.nbytes, threads=3)
    path.write_bytes(bytes(len(content)))
    assert weights.is_copied
    assert weights._bytes.tobytes() == content
    assert not weights.vector(0).flags.writeable


def test_a_damaged_file_is_found_and_packed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path / "model")
    expected = generate(load(directory, huge_pages="always"))
    [path] = packed_files()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = load(directory, huge_pages="always")
    assert "its weights do not have their checksum" in caplog.text
    assert _weights(again).is_copied
    assert generate(again) == expected


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("wanted", "free", "is_copied"),
    [("auto", 2.1, True), ("auto", 1.9, False), ("always", 1.1, True), ("always", 0.9, False), ("off", 9, False)],
)
def test_weights_are_copied_where_memory_allows(
    wanted: str, free: float, is_copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`free` counts in sizes of the file."""
    directory = write(tmp_path / "model")
    expected = generate(load(directory, huge_pages="off"))
    [path] = packed_files()
    monkeypatch.setattr(native_load, "free_memory", lambda: int(path.stat().st_size * free))
    runner = load(directory, huge_pages=wanted)
    assert _weights(runner).is_copied is is_copied
    assert generate(runner) == expected


def test_without_memory_for_a_copy_the_file_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    directory = write(tmp_path / "model")
    expected = generate(load(directory, huge_pages="off"))
    monkeypatch.setattr(huge_pages, "copied", refuse)
    runner = load(directory, huge_pages="always")
    assert not _weights(runner).is_copied
    assert generate(runner) == expected


def test_a_file_that_lies_in_huge_pages_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "count", lambda memory: memory.size)
    assert not _weights(load(write(tmp_path / "model"), huge_pages="always")).is_copied


def test_a_copy_leaves_the_cache_as_many_pages_as_the_file_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy was taken from what is free, and was then subtracted once more."""
    directory = write(tmp_path / "model")
    load(directory)
    [path] = packed_files()
    size = path.stat().st_size
    free = 4 * size
    monkeypatch.setattr(native_runner, "free_memory", lambda: free)
    mapped = load(directory, huge_pages="off", kv_memory=None)
    monkeypatch.setattr(native_runner, "free_memory", lambda: free - size)
    copy = load(directory, huge_pages="always", kv_memory=None)
    assert _weights(copy).is_copied
    assert copy.spec.num_pages == mapped.spec.num_pages


@pytest.mark.cases(3)
@pytest.mark.parametrize("size", [1, HUGE - 1, HUGE, 16 * HUGE + 5, 40 * HUGE])
def test_threads_copy_every_byte(size: int) -> None:
    written = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    source = mmap.mmap(-1, size)
    source.write(written.tobytes())
    copy = copied(source, threads=3)
    assert np.array_equal(copy, written)
    assert 0 <= count(copy) <= size


def test_only_the_memorys_own_mappings_count(tmp_path: Path) -> None:
    memory = np.zeros(8 * HUGE, np.uint8)
    at = memory.ctypes.data

    def mapping(first: int, last: int, **fields: int) -> str:
        rows = "".join(f"{name}:{value >> 10:>12} kB\n" for name, value in fields.items())
        return f"{first:08x}-{last:08x} r--p 00000000 fd:00 12  /a file: weights\nSize:  1 kB\n{rows}VmFlags: rd mr\n"

    (tmp_path / "smaps").write_text(
        mapping(at - HUGE, at, AnonHugePages=HUGE)
        + mapping(at, at + 4 * HUGE, AnonHugePages=0, FilePmdMapped=2 * HUGE)
        + mapping(at + 4 * HUGE, at + 8 * HUGE, AnonHugePages=HUGE, FilePmdMapped=0)
        + mapping(at + 8 * HUGE, at + 9 * HUGE, AnonHugePages=HUGE)
    )
    assert count(memory, tmp_path / "smaps") == 3 * HUGE
    assert count(memory, tmp_path / "none") == 0


@pytest.mark.parametrize(("text", "name"), [("always [madvise] never", "madvise"), ("[never]", "never"), ("", None)])
def test_the_systems_setting_is_the_one_in_brackets(text: str, name: str | None, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text(f"{text}\n")
    assert setting(tmp_path / "enabled") == name
    assert setting(tmp_path / "none") is None

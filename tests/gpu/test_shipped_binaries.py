"""Compiled kernels that come with the package: what goes into the archive, and what a start makes of it."""

import json
import zipfile
from pathlib import Path

import pytest

from ostro.backends.cuda.shipped_binaries import pack, unpack

MARKS = {"NVIDIA H200": ["ostro-first", "ostro-second"]}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Of a cache with one kernel, with all that Triton keeps of it, and one launcher."""
    kernel, launcher = tmp_path / "made" / "KERNEL", tmp_path / "made" / "LAUNCHER"
    for entry in (kernel, launcher):
        entry.mkdir(parents=True)
    files = {"add.cubin": b"\x7fELF", "add.json": b"{}", "add.ptx": b"text", "add.ttir": b"text"}
    for name, content in files.items():
        (kernel / name).write_bytes(content)
    listed = {"child_paths": {name: str(kernel / name) for name in files}}
    (kernel / "__grp__add.json").write_text(json.dumps(listed))
    (launcher / "launcher.so").write_bytes(b"\x7fELF")
    found = tmp_path / "package" / "binaries.zip"
    assert pack(tmp_path / "made", found, MARKS) == 2
    return found


def test_entries_are_unpacked_where_triton_looks_for_them(archive: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert unpack(archive, cache, None) == 2
    group = json.loads((cache / "KERNEL" / "__grp__add.json").read_text())["child_paths"]
    # Triton ignores files of a group that are not at their paths.
    assert {name: Path(path).read_bytes() for name, path in group.items()} == {
        "add.cubin": b"\x7fELF",
        "add.json": b"{}",
    }
    assert all(Path(path).parent == cache / "KERNEL" for path in group.values())
    assert (cache / "LAUNCHER" / "launcher.so").exists()
    assert not (cache / "KERNEL" / "add.ptx").exists()


def test_marks_are_those_of_the_gpu_that_is_there(archive: Path, tmp_path: Path) -> None:
    for gpu, marks in (("NVIDIA H200", ["ostro-first", "ostro-second"]), ("NVIDIA L4", []), (None, [])):
        cache = tmp_path / str(gpu)
        unpack(archive, cache, gpu)
        assert sorted(each.name for each in cache.glob("ostro-[fs]*")) == marks


def test_what_the_cache_has_is_left_alone(archive: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "KERNEL").mkdir(parents=True)
    assert unpack(archive, cache, None) == 1
    assert not list((cache / "KERNEL").iterdir())


def test_an_archive_is_unpacked_once(archive: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    unpack(archive, cache, None)
    (cache / "LAUNCHER" / "launcher.so").unlink()
    (cache / "LAUNCHER").rmdir()
    assert unpack(archive, cache, None) == 0
    assert not (cache / "LAUNCHER").exists()


@pytest.mark.parametrize("content", [b"", b"PK no archive", None])
def test_an_unusable_archive_is_no_error(content: bytes | None, archive: Path, tmp_path: Path) -> None:
    if content is None:
        with zipfile.ZipFile(archive, "w") as without_marks:
            without_marks.writestr("KERNEL/add.json", "{}")
    else:
        archive.write_bytes(content)
    assert unpack(archive, tmp_path / "cache", None) == 0
    assert unpack(tmp_path / "none.zip", tmp_path / "cache", None) == 0


def test_a_cache_that_cannot_be_written_is_no_error(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a directory")
    assert unpack(archive, tmp_path / "cache", None) == 0

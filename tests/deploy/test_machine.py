"""What a container's limits mean to the server: they are read from the files in which Linux tells them."""

import sys
from pathlib import Path

import pytest

from ostro.processes.children import reap_orphans
from ostro.system.machine import _free_in_container, cpu_limit, in_container


def _cgroup(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(f"{text}\n")
    return directory


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("1600000 100000", 16)],
)
def test_threads_are_as_many_as_cpus_are_granted(tmp_path: Path, text: str, limit: int | None) -> None:
    assert cpu_limit(_cgroup(tmp_path, cpu_max=text)) == limit


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_a_container_is_known_by_its_engines_mark_or_its_platforms_variable(tmp_path: Path, mark: str) -> None:
    assert not in_container(tmp_path, {"HOME": "/"})
    assert in_container(tmp_path, {"K_SERVICE": "ostro"})
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).touch()
    assert in_container(tmp_path, {})


def test_without_a_container_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None
    assert _free_in_container(tmp_path) == sys.maxsize
    assert _free_in_container(_cgroup(tmp_path, memory_max="max", memory_current="5")) == sys.maxsize


def test_files_that_were_read_do_not_count_as_used_memory(tmp_path: Path) -> None:
    """A model of 3 GB that had just been fetched left no room for itself."""
    stat = "anon 500\nfile 3100\ninactive_file 3000\nactive_file 100"
    cgroup = _cgroup(tmp_path, memory_max="4000", memory_current="3600", memory_stat=stat)
    assert _free_in_container(cgroup) == 3400


def test_only_process_1_waits_for_what_it_did_not_start() -> None:
    assert reap_orphans() == 0

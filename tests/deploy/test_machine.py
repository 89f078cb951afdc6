"""What it means to the server to run in a container."""

from pathlib import Path

import pytest

from ostro.processes.children import reap_orphans
from ostro.system.machine import in_container


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_a_container_is_known_by_its_engines_mark_or_its_platforms_variable(tmp_path: Path, mark: str) -> None:
    assert not in_container(tmp_path, {"HOME": "/"})
    assert in_container(tmp_path, {"K_SERVICE": "ostro"})
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).touch()
    assert in_container(tmp_path, {})


def test_only_process_1_waits_for_what_it_did_not_start() -> None:
    assert reap_orphans() == 0

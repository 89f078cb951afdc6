"""A directory of ranks is removed with them; one that killed ranks have left, by the next."""

import subprocess
import sys
from pathlib import Path

from ostro.backends.ranks.store_directory import StoreDirectory

KILLED = """
import os, pathlib, signal, sys
from ostro.backends.ranks.store_directory import StoreDirectory

(StoreDirectory(pathlib.Path(sys.argv[1])).path / "store").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_directory_is_removed_when_its_ranks_end(tmp_path: Path) -> None:
    directory = StoreDirectory(tmp_path)
    (directory.path / "store").touch()
    directory.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_killed_ranks_is_removed_by_the_next_and_others_stay(tmp_path: Path) -> None:
    """They were left behind: an engine and its ranks are killed together."""
    (tmp_path / "of-others").mkdir()
    living = StoreDirectory(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.glob("ostro-ranks-*"))) == 2
    fresh = StoreDirectory(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"of-others", living.path.name, fresh.path.name}
    for each in (living, fresh):
        each.remove()

"""The memory of an engine is that of all its processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostro.processes.children import children, resident_bytes

MIB = 1 << 20
# Numbers of its own, unlike the interpreter, which it shares with this process.
HUNGRY = f"held = bytes([1]) * {128 * MIB}; print(flush=True); input()"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture
def hungry() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_children_are_listed_while_they_live(hungry: subprocess.Popen[bytes]) -> None:
    assert hungry.pid in children()
    hungry.communicate(b"\n")
    assert hungry.pid not in children()


def test_memory_includes_that_of_children_but_not_what_they_share(hungry: subprocess.Popen[bytes]) -> None:
    status = Path(f"/proc/{hungry.pid}/status").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in status if line.startswith("Rss")}
    assert sizes["RssAnon:"] > 128 * MIB
    whole = resident_bytes()
    hungry.communicate(b"\n")
    # This process may give back or take a little meanwhile.
    assert whole - resident_bytes() == pytest.approx(sizes["RssAnon:"], abs=16 * MIB)

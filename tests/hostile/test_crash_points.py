"""A short run of the crash points: at some of the calls that write to the cache. `make test-hostile` takes them all."""

from pathlib import Path

import pytest
from crash_shim import build_shim, needs_shim, run_with_shim
from native_models import needs_library

HERE = Path(__file__).parent

pytestmark = [needs_library, needs_shim]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


def run(shim: Path, *command: str | Path) -> str:
    done = run_with_shim(shim, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("every", [120, pytest.param(15, marks=pytest.mark.full)])
def test_whatever_a_crash_interrupts_the_cache_is_whole_afterwards(shim: Path, every: int) -> None:
    modes = ("--modes", "kill,full,disk,read-only,denied", "--every", str(every))
    said = run(shim, HERE / "crash_points.py", "pack", "evict", "refresh", "cached", *modes)
    assert ", 0 failures" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", ["pack", "repack", "update", "evict", "download", "refresh", "cached", "wheel"])
def test_at_every_call_that_writes_a_crash_leaves_the_cache_whole(shim: Path, scenario: str) -> None:
    assert ", 0 failures" in run(shim, HERE / "crash_points.py", scenario)


CLOCK = """
import ctypes, sys, time
from pathlib import Path
from ostro.sources.address import parse_address
from ostro.sources.store import FileRecord, Manifest, ModelStore

store, reference = ModelStore(Path(sys.argv[1])), parse_address("gs://bucket/model")

def publish(version):
    files = store.objects / "files"
    files.mkdir(parents=True)
    (files / "weights").write_text(version)
    target = store.place(reference, version)
    manifest = Manifest(str(reference), "model", time.time(), {"weights": FileRecord(len(version))})
    store.publish(files, target, manifest)
    return target

YEARS = 10 * 365 * 24 * 3600
before = time.time()
ctypes.CDLL(None).crash_shift(ctypes.c_long(YEARS))
assert time.time() - before > YEARS - 1
first = publish("first")
ctypes.CDLL(None).crash_shift(ctypes.c_long(0))
with store.hold(first):
    second = publish("second")
    print(store.find(reference).name == second.name, first.exists())
    store.make_current(first)
    print(store.find(reference).name == first.name)
store.sweep()
print([store.verify(entry) for entry in store.entries()])
"""


def test_a_newer_version_is_current_though_the_clock_was_ahead_before(shim: Path, tmp_path: Path) -> None:
    """The older version is in use, so it stays, and its time is later."""
    said = run(shim, "-c", CLOCK, tmp_path / "cache")
    assert said.splitlines() == ["True True", "True", "[[]]"]

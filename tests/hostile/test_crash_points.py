"""A short run of the crash points: at some of the calls that write to the cache. `make test-hostile` takes them all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_models import needs_library

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    needs_library,
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="the shim needs Linux and a C compiler"),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "crash_shim.so"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, HERE / "crash_shim.c", "-ldl"], check=True)
    return path


def run(shim: Path, *command: str | Path) -> str:
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": str(HERE.parent / "support"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("every", [60, pytest.param(15, marks=pytest.mark.full)])
def test_whatever_a_crash_interrupts_the_cache_is_whole_afterwards(shim: Path, every: int) -> None:
    modes = ("--modes", "kill,full,disk", "--every", str(every))
    said = run(shim, HERE / "crash_points.py", "pack", "evict", "refresh", *modes)
    assert ", 0 failures" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", ["pack", "repack", "update", "evict", "download", "refresh", "wheel"])
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

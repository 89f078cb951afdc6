"""Disks that are full, read-only or another user's: whatever can go on does so and warns once, and whatever cannot
names the place and the cure. `test_crash_points.py` looks at what is left in the cache.
"""

import subprocess
from pathlib import Path

import pytest
from crash_shim import DENIED, FULL, READ_ONLY, build_shim, needs_shim, run_with_shim
from model_directory import write_model
from native_models import needs_library

pytestmark = needs_shim

WAYS = pytest.mark.parametrize("way", [FULL, READ_ONLY, DENIED], ids=["full", "read-only", "denied"])
TINY = ("hello", "--max-tokens", "3", "--device", "cpu", "--kv-memory", "4M")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


def ostro(shim: Path, way: str, cache: Path, *words: str | Path, root: str = "/") -> subprocess.CompletedProcess[str]:
    """Runs a command where nothing below `root` can be written: neither the cache nor temporary files."""
    env = {"LD_CRASH_MODE": way, "LD_CRASH_ROOT": root, "OSTRO_CACHE": str(cache)}
    done = run_with_shim(shim, "-m", "ostro", *words, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.full
@needs_library
@WAYS
def test_weights_that_no_disk_takes_are_packed_into_memory(shim: Path, model: Path, tmp_path: Path, way: str) -> None:
    """Without a directory for temporary files, torch ran the model, or nothing did, and nobody was told why."""
    done = ostro(shim, way, tmp_path / "cache", "generate", "--model", model, *TINY, "--backend", "native")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    [warning] = [line for line in done.stderr.splitlines() if "into memory" in line]
    assert str(tmp_path / "cache") in warning
    assert "OSTRO_CACHE" in warning
    assert not (tmp_path / "cache").exists()


@needs_library
@pytest.mark.full
@WAYS
@pytest.mark.parametrize("tier", ["--kv-disk", "--kv-shared"])
def test_prefixes_that_no_disk_takes_are_not_kept(shim: Path, model: Path, tmp_path: Path, way: str, tier: str) -> None:
    done = ostro(shim, way, tmp_path / "cache", "generate", "--model", model, *TINY, tier, tmp_path / "pages")
    assert done.returncode == 0, done.stderr
    _, warning = done.stderr.splitlines()
    assert str(tmp_path / "pages") in warning
    assert f"Set {tier[2:].replace('-', '_')} to another directory" in warning


@pytest.mark.full
@WAYS
@pytest.mark.parametrize("words", [("chat",), ("generate", "--tensor-parallel", "2", "--backend", "torch", *TINY)])
def test_what_needs_temporary_files_says_so(
    shim: Path, model: Path, tmp_path: Path, way: str, words: tuple[str, ...]
) -> None:
    """Both ended in a traceback."""
    place = (model,) if words[0] == "chat" else ("--model", model)
    done = ostro(shim, way, tmp_path / "cache", *words, *place)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ostro: ")
    assert "Set TMPDIR" in done.stderr


@needs_library
@pytest.mark.full
@pytest.mark.parametrize("way", [READ_ONLY, DENIED])
def test_a_model_that_cannot_be_deleted_is_named(shim: Path, model: Path, tmp_path: Path, way: str) -> None:
    """It was a traceback."""
    cache = tmp_path / "cache"
    kept = run_with_shim(
        shim, "-m", "ostro", "generate", "--model", model, *TINY, "--backend", "native", env={"OSTRO_CACHE": str(cache)}
    )
    assert kept.returncode == 0, kept.stderr
    [packed] = [path for path in (cache / "packed").iterdir() if path.is_dir()]
    done = ostro(shim, way, cache, "models", "rm", f"packed/{packed.name[:12]}", root=str(cache))
    assert done.returncode == 1
    assert f"Cannot delete {packed}" in done.stderr
    assert packed.is_dir()


@pytest.mark.parametrize("words", [("models", "available"), ("models", "list")])
def test_output_that_a_full_disk_does_not_take_is_an_error(shim: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """It was a traceback."""
    code = "import sys; sys.stdout = open('/dev/full', 'w'); from ostro.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_with_shim(shim, "-c", code, *words, env={"OSTRO_CACHE": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "ostro: No space left to write the output. Free some, or choose another location.\n"

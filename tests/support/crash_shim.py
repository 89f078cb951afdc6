"""Builds crash_shim.c, which lets calls that write to disk fail; runs Python with it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_COMPILER = shutil.which("cc") or shutil.which("gcc")
FULL, READ_ONLY, DENIED = "3", "5", "6"

needs_shim = pytest.mark.skipif(
    sys.platform != "linux" or _COMPILER is None, reason="the shim needs Linux and a C compiler"
)


def build_shim(directory: Path) -> Path:
    path = directory / "crash_shim.so"
    assert _COMPILER is not None
    source = _TESTS / "hostile" / "crash_shim.c"
    subprocess.run([_COMPILER, "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path


def run_with_shim(
    shim: Path, *command: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python. Its output comes over pipes, which are never full."""
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": str(_TESTS / "support"),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    line = [sys.executable, *command]
    return subprocess.run(
        line,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
    )

"""A short run of the packed-file fuzzer; `make test-hostile` runs a long one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from native_models import needs_library

pytestmark = needs_library

HERE = Path(__file__).parent


def fuzz(*arguments: str) -> None:
    """In a process of its own, without threads, as it forks."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "support"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "packed_fuzzer.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"'([^']+)': (\d+)", done.stdout)}
    # It did what it is there for.
    assert min(counts[kind] for kind in ("refused", "packed anew", "forged, refused")) > 0, done.stdout


def test_mutated_packed_files_are_packed_again_or_refused() -> None:
    fuzz("--count", "300", "--seed", "1")


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_moe", "falcon_h1", "nemotron_h"])
def test_mutated_steps_of_recurrent_layers_are_refused_or_run(family: str) -> None:
    fuzz("--count", "1000", "--seed", "4", "--family", family)


@pytest.mark.slow
def test_many_mutated_packed_files_are_packed_again_or_refused() -> None:
    fuzz("--count", "20000", "--seed", "3")

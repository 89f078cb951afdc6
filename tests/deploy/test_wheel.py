"""A wheel, from its build to its first answer, where there is no compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from first_answer import build_wheel, from_wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here to build it with")
    return build_wheel(tmp_path_factory.mktemp("built"))


def test_it_installs_and_answers_natively_in_a_clean_environment_without_a_compiler(
    wheel: Path, tmp_path: Path
) -> None:
    """Ends with a message unless the answer is right, comes to an end, and is the native core's."""
    timeline = from_wheel(tmp_path, wheel)
    assert "Paris" in timeline.events[-1][1]
    imported = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", "import ostro; print(ostro.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout.startswith(str(tmp_path / "venv")), "nothing of it is this checkout's"


def test_one_that_must_have_the_core_is_not_built_without(tmp_path: Path) -> None:
    pip: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path]
    env = os.environ | {"CXX": "/nonexistent/c++", "OSTRO_NATIVE_REQUIRED": "1"}
    ran = subprocess.run([*pip, ROOT], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "/nonexistent/c++" in ran.stdout + ran.stderr
    assert not list(tmp_path.glob("*.whl"))

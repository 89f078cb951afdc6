"""pre-commit's hooks run the tools of this project, and what they would change is as they want it already."""

import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from checkout import ROOT

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
HOOKS: dict[str, dict[str, Any]] = {hook["id"]: hook for repo in CONFIG["repos"] for hook in repo["hooks"]}
NATIVE = sorted(path for path in (ROOT / "native").rglob("*.*") if path.suffix in (".cpp", ".h", ".inl"))


def test_no_hook_comes_from_another_repository() -> None:
    assert {repo["repo"] for repo in CONFIG["repos"]} == {"local"}


def test_tools_are_those_that_make_dev_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev = {re.split(r"[<>=\[;]", each)[0] for each in project["optional-dependencies"]["dev"]}
    programs = {hook["entry"].split()[0] for hook in HOOKS.values() if hook["language"] == "system"}
    assert programs == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert {program.rpartition("/")[2] for program in programs} <= dev


def test_every_source_of_the_native_core_is_formatted() -> None:
    assert [path for path in NATIVE if not re.search(HOOKS["clang-format"]["files"], str(path.relative_to(ROOT)))] == []
    assert NATIVE


def test_the_native_core_is_laid_out_as_clang_format_wants_it() -> None:
    [pinned] = HOOKS["clang-format"]["additional_dependencies"]
    program = shutil.which("clang-format")
    if program is None or pinned.partition("==")[2] not in subprocess.check_output([program, "--version"], text=True):
        pytest.skip(f"versions lay out code differently: pip install {pinned}")
    ran = subprocess.run(
        [program, "--dry-run", "-Werror", *NATIVE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr

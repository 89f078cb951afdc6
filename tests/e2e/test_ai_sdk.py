"""Vercel's AI SDK: objects and tools over Responses, its default, and over chat.

Its packages are installed into a directory of the test's own.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from client_process import CALLS, PERSON, SUNNY
from live_server import LiveServer

SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    directory = tmp_path_factory.mktemp("ai-sdk")
    shutil.copy(SOURCES / "ai-sdk.package.json", directory / "package.json")
    shutil.copy(SOURCES / "ai_sdk.mjs", directory)
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    ran = subprocess.run(install, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
    if ran.returncode:
        pytest.skip("npm cannot fetch Vercel's AI SDK here")
    return directory


def test_ai_sdk_makes_objects_and_calls_tools(installed: Path, scripted: LiveServer) -> None:
    ran = subprocess.run(
        ["node", "ai_sdk.mjs", scripted.url, CALLS, SUNNY, PERSON],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, f"{ran.stderr}\n{scripted.log_text[-2000:]}"
    for seen in json.loads(ran.stdout.splitlines()[-1]).values():
        assert seen["whole"] == seen["streamed"] == "It is sunny in Oslo."
        assert seen["cities"] == ["Oslo", "Oslo", "Rome", "Rome"]
        assert seen["object"] == {"name": "Ada", "age": 36}
        assert seen["steps"] == 2

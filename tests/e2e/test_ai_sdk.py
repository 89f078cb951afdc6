"""Vercel's AI SDK: objects and tools over Responses, its default, and over chat.

Its packages are installed into a directory of the test's own.
"""

import json
import subprocess
from pathlib import Path

import pytest
from client_process import CALLS, PERSON, SUNNY
from live_server import LiveServer
from node_packages import npm_install

SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npm_install(tmp_path_factory.mktemp("ai-sdk"), SOURCES / "ai-sdk.package.json", SOURCES / "ai_sdk.mjs")


@pytest.mark.full
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

"""OpenAI's Node client against `ostro serve`. Its package is installed into a directory of the test's own."""

import json
import subprocess
from pathlib import Path

import pytest
from live_server import live_server
from node_packages import npm_install

SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npm_install(tmp_path_factory.mktemp("node"), SOURCES / "package.json", SOURCES / "client.mjs")


def test_node_client_and_its_stream_helper(installed: Path, tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        ran = subprocess.run(
            ["node", "client.mjs", f"{server.url}/v1"],
            cwd=installed,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["whole"]
    assert seen["whole"] == seen["streamed"] == seen["helper"] == seen["final"]
    assert (seen["finish_reason"], seen["usage"], seen["models"]) == ("length", 12, 1)
    assert seen["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}

"""`pip install .` into an empty environment, and the default model served from it: small, and without torch."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

from install_size import Installed, installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MOST_MB = 250


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Installed]:
    directory = tmp_path_factory.mktemp("installed") / "environment"
    return directory, installed(directory)


@pytest.fixture(scope="module")
def server(environment: tuple[Path, Installed], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The default model, from that environment."""
    directory = tmp_path_factory.mktemp("served")
    with live_server(directory, faults="", python=environment[0] / "bin" / "python") as live:
        yield live


def test_it_is_small_and_brings_no_torch(environment: tuple[Path, Installed]) -> None:
    found = environment[1]
    assert not found.has_torch
    assert found.megabytes <= MOST_MB


def test_its_own_check_finds_nothing_missing(environment: tuple[Path, Installed]) -> None:
    subprocess.run([environment[0] / "bin" / "python", "-m", "pip", "check"], check=True)


def test_it_answers_scores_and_penalises(server: LiveServer) -> None:
    with server.client() as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"messages": question, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        answer = post(client, "/v1/chat/completions", **body)["choices"][0]
        assert "Paris" in answer["message"]["content"]
        assert all(len(each["top_logprobs"]) == 2 for each in answer["logprobs"]["content"])
        scored = post(
            client, "/loglikelihood", prompts=["The capital of France is"] * 2, continuations=[" Paris", " Oslo"]
        )
        assert scored["ll"][0] > scored["ll"][1]
        penalised = post(
            client, "/v1/completions", prompt="a a a a a a", max_tokens=8, temperature=0, frequency_penalty=2.0
        )
        assert penalised["usage"]["completion_tokens"] == 8


def test_command_that_needs_torch_says_so(environment: tuple[Path, Installed], tmp_path: Path) -> None:
    command = [str(environment[0] / "bin" / "ostro"), "generate", "hello", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "device cuda needs libraries that are not installed. Run: pip install 'ostro[torch]'" in done.stderr


def post(client: httpx.Client, path: str, **body: object) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found

"""From a checkout to a streamed answer with one command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from doc_pages import ROOT
from model_directory import write_model

pytestmark = pytest.mark.slow


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """URL of a server that `make serve` started with what is already installed."""
    model = write_model(tmp_path / "my-model")
    venv = Path(sys.prefix)
    options = [f"VENV={venv}", "INSTALL=:", f"ARGS=--port 0 --log-format json {model}"]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        make = subprocess.Popen(
            ["make", "serve", *options], cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True, env={**os.environ}
        )
    try:
        yield _listening(make, log)
    finally:
        os.killpg(make.pid, signal.SIGTERM)
        try:
            make.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(make.pid, signal.SIGKILL)
            make.wait()


def _listening(make: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and make.poll() is None:
        for line in log.read_text().splitlines():
            if '"listening"' in line and line.endswith("}"):
                return str(json.loads(line)["url"])
        time.sleep(0.1)
    raise AssertionError(f"make serve did not start: {log.read_text()}")


def test_make_serve_has_a_page_and_streams_an_answer(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        page = client.get("/")
        assert (page.status_code, "text/html" in page.headers["content-type"]) == (200, True)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            events = [line for line in answer.iter_lines() if line]
    # A busy machine sends all tokens in one event.
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas)
    assert events[-1] == "data: [DONE]"

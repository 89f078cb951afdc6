"""Ostro compared with a real other server, `transformers serve`, over the same tiny model."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from live_server import end_gently, live_server
from model_directory import write_model
from safetensors.torch import load_file, save_file

from ostro.cli import main
from ostro.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PROMPTS = ["the quick brown fox", "the lazy dog and", "yes, no", "system user assistant:", "jumps over"]
START_SECONDS = 120.0


def _needs() -> str | None:
    """Why transformers cannot serve here, if it cannot."""
    try:
        from transformers.utils.import_utils import is_serve_available
    except ImportError as error:
        return f"needs transformers: {error}"
    return None if is_serve_available() else "needs `pip install 'transformers[serving]'`"


def write_plain_model(directory: Path) -> Path:
    """It writes printable ASCII only: transformers drops a character that is unfinished at the end of a stream."""
    write_model(directory)
    tokenizer = Tokenizer.load(directory)
    weights = load_file(directory / "model.safetensors")
    head = weights["lm_head.weight"]
    plain = [
        id for id in range(len(head)) if tokenizer.token_text(id).isascii() and tokenizer.token_text(id).isprintable()
    ]
    for id in set(range(len(head))) - set(plain):
        # Half as likely a choice as another, so never the first.
        head[id] = head[plain[id % len(plain)]] / 2
    save_file(weights, directory / "model.safetensors")
    # Ostro reads the end from the tokenizer's settings, transformers from here.
    ends = {"eos_token_id": sorted(tokenizer.eos_ids)}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory


@contextmanager
def transformers_serve(model: Path, log: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--device", "cpu"],
            stdout=sink,
            stderr=sink,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    try:
        _until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_gently(process)


def _until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=url, trust_env=False) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
    raise AssertionError(f"transformers serve did not start: {log.read_text()}")


@pytest.mark.skipif(_needs() is not None, reason=str(_needs()))
def test_greedy_outputs_agree_with_transformers_serve(tmp_path: Path) -> None:
    model = write_plain_model(tmp_path / "tiny")
    prompts, output, page = tmp_path / "prompts.txt", tmp_path / "out.json", tmp_path / "report.html"
    prompts.write_text("\n".join(PROMPTS))
    with (
        transformers_serve(model, tmp_path / "transformers.log") as other,
        live_server(tmp_path, str(model), faults="") as server,
    ):
        sides = ["--a", server.url, "--b", other, "--model-b", str(model)]
        files = ["--prompts", str(prompts), "--json", str(output), "--report", str(page)]
        for chat in ([], ["--chat"]):
            asked = ["--max-tokens", "16", "--seed", "7", "--fail-under", "1", *chat]
            status = main(["compare", *sides, *files, *asked])
            found = json.loads(output.read_text())
            assert status == 0, [(row["a"], row["b"]) for row in found["rows"]]
            assert found["agreement"]["exact"] == len(PROMPTS)
            assert found["a"]["num_tokens"] == found["b"]["num_tokens"] > 0
            assert found["b"]["ttft"]["p50"] > 0
            assert "100 %" in page.read_text()

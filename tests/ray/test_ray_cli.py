"""`serve run` as the docs show it, from a file and under a prefix."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
import yaml
from ray_cluster import until

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


def test_serve_run_starts_what_a_file_describes(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    application = {
        "name": "ostro",
        "route_prefix": "/llm",
        "import_path": "deploy.ray:build",
        "args": {"replicas": 1, "max_seq_len": 512, "served_model_name": "mine"},
    }
    config, log = tmp_path / "serve.yaml", tmp_path / "serve.log"
    config.write_text(
        yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]})
    )
    # Short: Ray's sockets lie in it.
    directory = tempfile.mkdtemp(prefix="ostro-ray-", dir="/tmp")
    env = {
        "OSTRO_FAULTS": "fake",
        "OSTRO_API_KEY": "secret",
        "RAY_TMPDIR": directory,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    program = Path(sys.executable).with_name("serve")
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(program), "run", str(config)], cwd=ROOT, env={**os.environ, **env}, stdout=sink, stderr=sink
        )
    try:
        headers = {"authorization": "Bearer secret"}
        url = f"http://127.0.0.1:{port}/llm"
        with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
            until(lambda: process.poll() is not None or is_ready(client), "ready", seconds=180)
            assert process.poll() is None, log.read_text()[-4000:]
            answer = client.post("/v1/completions", json={"model": "mine", "prompt": "x", "max_tokens": 2})
            assert (answer.status_code, answer.json()["model"]) == (200, "mine")
            assert client.post("/v1/completions", headers={"authorization": ""}, json={}).status_code == 401
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.TransportError:
        return False

"""`uvicorn --factory ostro.app:create_app`: the application under an ASGI server that is not ours."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from live_server import end_gently

from ostro.app import create_app
from ostro.errors import BadRequest

_SECONDS = 120.0


@dataclass(frozen=True)
class Uvicorn:
    client: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def log_text(self) -> str:
        return self.log.read_text()

    def until(self, status: int, path: str = "/readyz") -> httpx.Response:
        deadline = time.monotonic() + _SECONDS
        while (response := self.client.get(path)).status_code != status:
            assert time.monotonic() < deadline, self.log_text
            time.sleep(0.05)
        return response


@contextmanager
def uvicorn(directory: Path, env: Mapping[str, str]) -> Iterator[Uvicorn]:
    """On a free port, in the directory."""
    log = directory / "uvicorn.log"
    command = [sys.executable, "-m", "uvicorn", "--factory", "ostro.app:create_app", "--port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stderr=sink, stdout=sink, env={**os.environ, **env}, cwd=directory)
    try:
        with httpx.Client(base_url=_url(process, log), timeout=20.0, trust_env=False) as client:
            yield Uvicorn(client, process, log)
    finally:
        end_gently(process)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"Uvicorn running on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise AssertionError(f"uvicorn did not start: {log.read_text()}")


def engine_pids(parent: int) -> list[int]:
    ran = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(line.split()[0]) for line in ran.stdout.splitlines() if "ostro.engine_process.process" in line]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_uvicorn_serves_what_environment_dotenv_and_yaml_say_and_ends_the_engine_with_itself(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("max_new_tokens: 5\nserved_model_name: from-yaml\n")
    (tmp_path / ".env").write_text("OSTRO_CONFIG=settings.yaml\nOSTRO_API_KEY=hush\n")
    env = {"OSTRO_FAULTS": "fake", "OSTRO_SERVED_MODEL_NAME": "from-env", "OSTRO_PORT": "1"}
    with uvicorn(tmp_path, env) as server:
        server.until(200)
        [engine] = engine_pids(server.process.pid)
        client = server.client
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer hush"
        assert client.get("/v1/models").json()["data"][0]["id"] == "from-env"
        body = {"model": "from-env", "prompt": "the fox", "max_tokens": 5}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 5
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        refused = client.post("/v1/completions", json={**body, "max_tokens": 6})
        assert refused.status_code == 400
        assert "port from OSTRO_PORT in the environment is ignored: the ASGI server decides it" in server.log_text
    assert not is_running(engine)
    assert server.process.returncode in (0, -signal.SIGTERM)


@pytest.mark.full
def test_model_that_cannot_be_served_leaves_the_app_unready_with_the_reason_in_the_log(tmp_path: Path) -> None:
    with uvicorn(tmp_path, {"OSTRO_MODEL": str(tmp_path / "nothing-here")}) as server:
        assert server.until(200, "/healthz").json() == {"status": "ok"}
        deadline = time.monotonic() + _SECONDS
        while server.client.get("/readyz").json() != {"status": "failed"}:
            assert time.monotonic() < deadline, server.log_text
            time.sleep(0.05)
        while "the model cannot be served" not in server.log_text:
            assert time.monotonic() < deadline, server.log_text
            time.sleep(0.05)
        assert "nothing-here" in server.log_text


@pytest.mark.full
def test_settings_may_be_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", "from ostro.app import create_app; print(type(create_app(ui=True)).__name__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, f"{FastAPI.__name__}\n"), ran.stderr
    with pytest.raises(BadRequest, match=r"max_batch_seqs = 0 \(create_app\(max_batch_seqs=…\)\)"):
        create_app(max_batch_seqs=0)
    with pytest.raises(BadRequest, match=r"create_app\(modle=…\) is not a setting\. Did you mean model\?"):
        create_app(modle="./m")

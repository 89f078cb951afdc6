"""`ostro serve` in a process of its own, for tests; the fake runner in its engine unless told otherwise."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from warm_start import WarmProcess, warm_start

_START_SECONDS = 120.0

Process = subprocess.Popen[bytes] | WarmProcess


@dataclass(frozen=True)
class LiveServer:
    url: str
    process: Process
    log: Path

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=120.0, trust_env=False)

    @property
    def log_text(self) -> str:
        return self.log.read_text()


@contextmanager
def live_server(
    directory: Path,
    *args: str,
    faults: str = "fake",
    env: Mapping[str, str] | None = None,
    ready: bool = True,
    port: int = 0,
    files: int | None = None,
    python: Path | None = None,
    cold: bool = False,
) -> Iterator[LiveServer]:
    """Listens on a free port; its log lies in the directory. It is ready when entered, unless `ready` is false. `files`
    is how many it may open, as `ulimit -n` says. `python` is another environment's, which sees nothing of this one. It
    is forked from a process that has started before, unless `cold`, or one of these asks for what that has not.

    A server whose model is not found for long says late where it listens: give it a `port`.
    """
    log = directory / "server.log"
    # In a container a bucket's models are served on all addresses, and tests may run in one.
    inherited = {name: value for name, value in os.environ.items() if python is None or not name.startswith("PYTHON")}
    environment = {**inherited, "OSTRO_FAULTS": faults, "OSTRO_HOST": "127.0.0.1", **(env or {})}
    command = ["serve", "--port", str(port), "--log-format", "json", *args]
    with log.open("wb") as sink:
        process: Process
        if cold or files is not None or python is not None or any(name.startswith("PYTHON") for name in env or {}):
            line = [str(python or sys.executable), "-m", "ostro", *command]
            process = _cold_start(line, files, output=sink, environment=environment, cwd=directory)
        else:
            process = warm_start(command, output=sink, environment=environment, cwd=directory)
    try:
        server = LiveServer(f"http://127.0.0.1:{port}" if port else _url(process, log), process, log)
        if ready:
            _until_ready(server)
        yield server
    finally:
        end_gently(process)


def _cold_start(
    line: list[str], files: int | None, *, output: IO[bytes], environment: Mapping[str, str], cwd: Path
) -> subprocess.Popen[bytes]:
    if files is not None:
        line = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *line]
    return subprocess.Popen(line, stderr=output, stdout=output, env=environment, cwd=cwd)


def end_gently(process: Process) -> None:
    """Ends the process by SIGTERM, then by SIGKILL if that does not suffice."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _url(process: Process, log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if '"listening"' in line and line.endswith("}"):
                return str(json.loads(line)["url"])
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {log.read_text()}")


def _until_ready(server: LiveServer) -> None:
    deadline = time.monotonic() + _START_SECONDS
    with server.client() as client:
        while time.monotonic() < deadline:
            if client.get("/readyz").status_code == 200:
                return
            time.sleep(0.05)
    raise AssertionError(f"the server did not become ready: {server.log_text}")

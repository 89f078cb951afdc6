"""A server of either kind as a process, the load on it, and what it holds in memory. Knows /proc, so it needs Linux."""

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import children_of, resident_bytes

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Served:
    process: subprocess.Popen[bytes]
    port: int
    started: float
    """Start of its process, by time.perf_counter."""
    log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def ask(self, path: str, body: object, timeout: float = START_SECONDS) -> Any:
        """A whole answer, read."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {data[:500].decode(errors='replace')}")
        return json.loads(data)

    def first_token(self) -> float:
        """Seconds from the process's start to the first token. Asks again until the server answers."""
        deadline = time.perf_counter() + START_SECONDS
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0, "stream": True})
        while time.perf_counter() < deadline and self.process.poll() is None:
            if self._streams_text(body):
                return time.perf_counter() - self.started
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"The server ended, or did not answer in {START_SECONDS:g} s. It said: {self.said()}")

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def memory(self) -> "Memory":
        pids = [self.process.pid]
        for pid in pids:
            pids += children_of(pid)
        return Memory(sum(map(proportional_bytes, pids)), sum(map(resident_bytes, pids)))

    def _streams_text(self, body: str) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=START_SECONDS)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status == 503:
                return False
            if response.status != 200:
                raise RuntimeError(f"/v1/completions answered {response.status}: {response.read()[:500]!r}")
            for line in response:
                match json.loads(line[6:]) if line.startswith(b"data: {") else None:
                    case {"choices": [{"text": str(text)}, *_]} if text:
                        return True
            raise RuntimeError("The stream had no text.")
        except (ConnectionError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all of a server's processes, in bytes."""

    proportional: int
    """Pages that processes share are counted once."""
    resident: int


def proportional_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Served]:
    """The process is started when this is entered, and gone when it is left. What it prints is kept for complaints."""
    with tempfile.NamedTemporaryFile(prefix="server-", suffix=".log") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield Served(process, port, started, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def load(served: Served, arguments: Sequence[str]) -> dict[str, Any]:
    """The figures of one level of `ostro bench`, whose clients are in a process of their own."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "bench.json"
        command = [sys.executable, "-m", "ostro", "bench", "--url", served.url, "--endpoint", "completions"]
        command += ["--body", '{"temperature": 0}', "--ignore-eos", "--no-self-test", "--output-file", str(output)]
        ran = subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ran.returncode:
            raise RuntimeError(f"ostro bench failed: {ran.stdout[-2000:]}\nThe server said: {served.said()}")
        return read_load(json.loads(output.read_text(encoding="utf-8")))


def read_load(record: dict[str, Any]) -> dict[str, Any]:
    """The only level's figures; raises RuntimeError where requests failed or answers are too short to compare."""
    [level] = record["levels"]
    figures: dict[str, Any] = level["figures"]
    if figures["failed"] or figures["ended_early"] or figures["counted_by_events"]:
        raise RuntimeError(
            f"{figures['failed']} requests failed ({figures['errors']}), {figures['ended_early']} answers ended early, "
            f"{figures['counted_by_events']} told no count of tokens: such a run compares nothing."
        )
    return figures

"""`ostro serve` and its clients in processes of their own, for benchmarks. Knows /proc, so it needs Linux."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    pid: int

    @property
    def engine_pid(self) -> int:
        """Process id of the only engine. Other children check grammars and render templates."""
        [engine] = [
            pid for pid in children_of(self.pid) if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return engine


@contextmanager
def serving(
    *args: str, env: Mapping[str, str] | None = None, ready: bool = True, python: str = sys.executable
) -> Iterator[Server]:
    """A server that is ready on entry, or merely listening if that suffices. `python` may be another checkout's."""
    command = [python, "-m", "ostro", "serve", "--port", "0", "--log-format", "json", "--no-access-log", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if '"listening"' in line:
                    url = str(json.loads(line)["url"])
                    break
            else:
                raise RuntimeError(f"the server did not start: {''.join(said[-20:])}")
            if ready:
                _until_ready(url)
            host, _, port = url.removeprefix("http://").rpartition(":")
            yield Server(host, int(port), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def resident_bytes(pid: int) -> int:
    """Resident memory of the process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def cpu_seconds(pid: int) -> float:
    """CPU time of the process so far, over all its threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

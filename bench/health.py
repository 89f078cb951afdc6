"""How soon the server answers probes, and how soon while somebody sends it the longest prompt that it takes.

    python bench/health.py                        # the default model, on a warm cache
    python bench/health.py --no-save --repeats 1

Two figures. From the process's start to the first 200 of /healthz and of /readyz. And the latency of /healthz while a
prompt of 20 MB is posted and worked on: one of as many characters as are allowed, which is tokenised to its end and
then found to be longer than the context, and one that is over that limit at once.
"""

import argparse
import http.client
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro.schemas.fields import MAX_CHARACTERS
from serving import START_SECONDS, Server, serving

RESULTS = Path(__file__).parent / "results"
HOST = "127.0.0.1"
BARS = {"healthz_seconds": 2.0, "readyz_seconds": 20.0, "healthz_p99_seconds_under_a_long_prompt": 0.2}
PROBE_EVERY_SECONDS = 0.01
# Some characters of two bytes: as many as are allowed make 20 MB.
LONG_TEXT = "Un café à l'été, "


@dataclass(frozen=True, slots=True)
class Start:
    healthz_seconds: float
    readyz_seconds: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of /healthz during one post, in seconds."""

    body_bytes: int
    status: int
    post_seconds: float
    probes: int
    p50: float
    p99: float
    max: float


def start_and_stop() -> Start:
    """From a process that is not there yet, as a supervisor starts it, to one that serves."""
    port = _free_port()
    command = [sys.executable, "-m", "ostro", "serve", "--host", HOST, "--port", str(port), "--log-level", "warning"]
    began = time.perf_counter()
    with subprocess.Popen(command) as process:
        try:
            seconds = [_until_ok(process, port, path) - began for path in ("/healthz", "/readyz")]
        finally:
            process.send_signal(signal.SIGTERM)
    return Start(*seconds)


def latency_during(server: Server, body: bytes, path: str = "/v1/completions") -> Latency:
    over = threading.Event()
    seconds: list[float] = []
    probes = threading.Thread(target=_probe, args=(server, over, seconds))
    probes.start()
    try:
        began = time.perf_counter()
        status = _post(server, path, body)
        took = time.perf_counter() - began
    finally:
        over.set()
        probes.join()
    ordered = sorted(seconds)
    return Latency(
        body_bytes=len(body),
        status=status,
        post_seconds=took,
        probes=len(ordered),
        p50=statistics.median(ordered),
        p99=ordered[int(len(ordered) * 0.99)],
        max=ordered[-1],
    )


def long_prompts() -> dict[str, bytes]:
    allowed = (LONG_TEXT * (MAX_CHARACTERS // len(LONG_TEXT) + 1))[:MAX_CHARACTERS]
    too_long = "Once upon a time, " * (20_000_000 // 18)
    return {
        name: json.dumps({"prompt": text}, ensure_ascii=False).encode()
        for name, text in {"longest allowed": allowed, "over the limit": too_long}.items()
    }


def _probe(server: Server, over: threading.Event, seconds: list[float]) -> None:
    """A probe that is late because the one before was kept waiting counts from when it was due."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    due = time.perf_counter()
    while not over.is_set():
        time.sleep(max(0.0, due - time.perf_counter()))
        assert _status(connection, "GET", "/healthz") == 200
        seconds.append(time.perf_counter() - due)
        due += PROBE_EVERY_SECONDS
    connection.close()


def _post(server: Server, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
    status = _status(connection, "POST", path, body)
    connection.close()
    return status


def _until_ok(process: subprocess.Popen[bytes], port: int, path: str) -> float:
    """When it first answered with a 200."""
    deadline = time.perf_counter() + START_SECONDS
    while time.perf_counter() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        try:
            if _status(connection, "GET", path) == 200:
                return time.perf_counter()
        except OSError:
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(0.01)
    raise RuntimeError(f"the server never answered {path} with a 200")


def _status(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> int:
    connection.request(method, path, body, {"content-type": "application/json"} if body else {})
    response = connection.getresponse()
    response.read()
    return response.status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()

    start_and_stop()  # fetches the model if it is not there, and warms the page cache
    starts = [start_and_stop() for _ in range(args.repeats)]
    healthz = statistics.median(start.healthz_seconds for start in starts)
    readyz = statistics.median(start.readyz_seconds for start in starts)
    print(f"from the process's start: /healthz {healthz:.2f} s, /readyz {readyz:.2f} s (medians of {args.repeats})")

    latencies: dict[str, list[Latency]] = {}
    with serving() as server:
        for name, body in long_prompts().items():
            latencies[name] = [latency_during(server, body) for _ in range(args.repeats)]
            for run in latencies[name]:
                print(
                    f"/healthz during a prompt of {run.body_bytes / 1e6:.1f} MB, {name} ({run.status} after "
                    f"{run.post_seconds:.2f} s): p50 {run.p50 * 1e3:.1f} ms, p99 {run.p99 * 1e3:.1f} ms, "
                    f"max {run.max * 1e3:.1f} ms of {run.probes}"
                )
    record = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "bars": BARS,
        "median_healthz_seconds": healthz,
        "median_readyz_seconds": readyz,
        "starts": [asdict(start) for start in starts],
        "healthz_during_a_long_prompt": {name: [asdict(run) for run in runs] for name, runs in latencies.items()},
    }
    if not args.no_save:
        (RESULTS / "health.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

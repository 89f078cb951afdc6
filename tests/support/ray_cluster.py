"""Ostro on a Ray cluster of this machine, in processes of its own, for tests and benchmarks."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_END_SECONDS = 60.0


@dataclass(frozen=True)
class RayCluster:
    url: str
    process: subprocess.Popen[str]
    log: Path
    haproxy: Path | None = None
    """Directory of HAProxy's files, if it is installed."""

    def deploy(self, **args: object) -> None:
        """Deploys the application with these settings in place of the current one; returns once it is ready."""
        self._ask("deploy", args=args)

    def remove(self) -> None:
        self._ask("remove")

    def facts(self) -> list[dict[str, Any]]:
        """Facts about each replica that answers."""
        answer: list[dict[str, Any]] = self._ask("facts")
        return answer

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask("status")
        return answer

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)

    def async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120.0, trust_env=False, limits=limits)

    def _ask(self, what: str, **given: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **given}) + "\n")
        self.process.stdin.flush()
        told = self._line()
        assert "error" not in told, f"{told['error']}\n{self.log.read_text()[-4000:]}"
        return told["answer"]

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the cluster has ended: {self.log.read_text()[-4000:]}"
        told: dict[str, Any] = json.loads(line)
        return told


@contextlib.contextmanager
def ray_cluster(
    directory: Path, *, cpus: int = 2, direct: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """An empty cluster; its log lies in the directory. All its processes are gone when it is left.

    `direct` is with HAProxy, and requests go straight to replicas.
    """
    port, log = _free_port(), directory / "ray.log"
    # Not in the directory, whose path may be too long for sockets.
    haproxy = Path(tempfile.mkdtemp(prefix="ha-", dir="/tmp")) if direct else None
    driver = Path(__file__).with_name("ray_driver.py")
    # The second makes a machine its own cluster, on loopback: Ray's way for systems that ask before a program listens.
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, str(driver), str(port), str(cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env={**os.environ, **quiet, **({} if haproxy is None else _haproxy(haproxy)), **(env or {})},
            start_new_session=True,
        )
    try:
        cluster = RayCluster(f"http://127.0.0.1:{port}", process, log, haproxy)
        cluster._line()
        yield cluster
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait(_END_SECONDS)
        process.stdout.close()
        if haproxy is not None:
            shutil.rmtree(haproxy, ignore_errors=True)


def until(condition: Callable[[], bool], what: str, *, seconds: float = 60.0) -> float:
    """Waits for the condition; the seconds it took."""
    began = time.monotonic()
    while not condition():
        took = time.monotonic() - began
        assert took < seconds, f"{what}: waited {took:.0f} s in vain"
        time.sleep(0.1)
    return time.monotonic() - began


def _haproxy(home: Path) -> dict[str, str]:
    """Ray's variables: what the direct path needs, and files and ports that no other cluster uses."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(256 << 10),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        **{f"RAY_SERVE_HAPROXY_{name}": str(home / file) for name, file in files.items()},
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
        # Removing a replica need not take as long as it should where load balancers have to notice.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

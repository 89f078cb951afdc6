"""Two replicas are replaced one by one, by others with a new model, while clients send requests: none fails."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from round_robin import RoundRobin, round_robin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals a server as a cluster does")

_FAULTS = "fake,step_seconds=0.003"
_CLIENTS = 6


def _started(stack: ExitStack, directory: Path, model: Path) -> LiveServer:
    directory.mkdir()
    return stack.enter_context(live_server(directory, str(model), "--drain-timeout", "60", faults=_FAULTS))


def _answered(server: LiveServer) -> int:
    """Requests that it has answered."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:request_success_total{"))


def _until_more_are_answered(server: LiveServer, clients: "subprocess.Popen[bytes]") -> None:
    enough = _answered(server) + _CLIENTS
    while _answered(server) < enough:
        assert clients.poll() is None, "the clients gave up"
        time.sleep(0.05)


def _clients(balancer: RoundRobin, output: Path) -> "subprocess.Popen[bytes]":
    """They keep their connections, and send until they are interrupted."""
    load = ["--concurrency", str(_CLIENTS), "--requests", "1000000", "--input-len", "4-16", "--output-len", "8-24"]
    return subprocess.Popen(
        [sys.executable, "-m", "ostro", "bench", "--url", balancer.url, *load, "--output-file", str(output)],
        stdout=subprocess.DEVNULL,
    )


def test_no_request_fails_while_replicas_are_replaced(tmp_path: Path) -> None:
    # Under the same name, as clients ask for it.
    old, new = (write_model(tmp_path / version / "tiny", seed=seed) for seed, version in enumerate(("old", "new")))
    output = tmp_path / "clients.json"
    with ExitStack() as stack:
        balancer = stack.enter_context(round_robin())
        leaving = [_started(stack, tmp_path / f"leaving-{number}", old) for number in range(2)]
        for server in leaving:
            balancer.add(server.url)
        clients = _clients(balancer, output)
        stack.callback(clients.kill)
        for number, server in enumerate(leaving):
            _until_more_are_answered(server, clients)
            successor = _started(stack, tmp_path / f"coming-{number}", new)
            # What Kubernetes does: the new pod is ready, the old one gets no more connections, and then a signal.
            balancer.add(successor.url)
            balancer.remove(server.url)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            assert "requests cut off" not in server.log_text
            _until_more_are_answered(successor, clients)
        clients.send_signal(signal.SIGINT)
        assert clients.wait(60) == 128 + signal.SIGINT
    figures = json.loads(output.read_text())["levels"][0]["figures"]
    assert figures["failed"] == 0, figures["errors"]
    assert figures["succeeded"] >= 4 * _CLIENTS

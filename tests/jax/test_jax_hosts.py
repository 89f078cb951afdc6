"""One mesh over two processes, as on two hosts: they meet over the loopback device."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import jax_agreement
import jax_host
import numpy as np
import pytest
from jax._src.distributed import global_state
from jax_host import DEVICES, adapted_runner, answers
from live_server import live_server
from model_directory import write_model

from ostro import LLM, EngineConfig, SamplingParams
from ostro.backends.jax.hosts import LeadingPrograms, agree
from ostro.backends.jax.load import adapters_digest, weights_digest
from ostro.backends.jax.mesh import make_mesh
from ostro.backends.jax.programs import Programs, Recipe
from ostro.backends.jax.weights import COPIED
from ostro.errors import Unavailable
from ostro.system.mesh_hosts import ADDRESS, COUNT, NUMBER
from ostro.weights.adapter import LowRank

PROCESSES = 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def environment(number: int, port: int) -> dict[str, str]:
    address = f"127.0.0.1:{port}"
    return {
        ADDRESS: address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        COUNT: str(PROCESSES),
        NUMBER: str(number),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }


def start(number: int, port: int, script: str, *args: str) -> "subprocess.Popen[str]":
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment(number, port)
    command = [sys.executable, script, *args]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one() -> None:
    port = free_port()
    processes = [start(number, port, jax_host.__file__, str(DEVICES // PROCESSES)) for number in range(PROCESSES)]
    try:
        output, errors = processes[0].communicate(timeout=900)
        assert processes[0].returncode == 0, errors
        _, errors = processes[1].communicate(timeout=300)
        assert processes[1].returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    expected = answers(adapted_runner())
    # Gloo writes to standard output too.
    assert json.loads(output.splitlines()[-1]) == json.loads(json.dumps(expected))


@pytest.mark.slow
def test_the_same_command_on_two_hosts_is_one_server_which_outlives_their_engines(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    sizes = ("--max-batch-seqs", "8", "--max-batch-tokens", "64", "--kv-memory", "8M")
    args = (str(model), "--backend", "jax", "--tensor-parallel", "2", "--device", "cpu", *sizes)
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, top_p=0.9, repetition_penalty=1.2, ignore_eos=True)
    [expected] = LLM(str(model), config=EngineConfig(backend="torch", device="cpu", kv_memory=8 << 20)).generate(
        ["the quick brown fox"], params
    )
    body: dict[str, object] = {"prompt": "the quick brown fox", "max_tokens": 12, "ignore_eos": True}
    settings: dict[str, object] = {"temperature": 0.8, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2}
    with (
        live_server(directories[1], *args, faults="", env=environment(1, port), ready=False) as second,
        live_server(directories[0], *args, faults="", env=environment(0, port)) as first,
        first.client() as client,
        second.client() as other,
    ):
        answer = client.post("/v1/completions", json=body | settings)
        assert answer.json()["choices"][0]["text"] == expected.choices[0].text
        assert client.get("/health").json()["devices"] == 2
        assert other.get("/readyz").status_code == 503
        assert "Another host takes the requests" in other.post("/v1/completions", json=body).text
        for server in (first, second):
            with server.client() as operator:
                refused = operator.post("/admin/unload/model")
            assert (refused.status_code, "Several hosts" in refused.text) == (400, True)
        # More often than an engine may die while it loads.
        for killed in (second, first, first, first):
            os.kill(engine_of(killed.process.pid), signal.SIGKILL)
            # An error, or an answer if the loss was noticed before: then the request waits for the next engine.
            assert client.post("/v1/completions", json=body | settings).status_code in (200, 503)
            again = until_answered(client, body | settings)
            assert again["choices"][0]["text"] == expected.choices[0].text
        assert other.get("/health").json()["restarts"] >= 4


@pytest.mark.slow
def test_servers_with_differing_settings_exit_and_report_the_difference(tmp_path: Path) -> None:
    model, port = write_model(tmp_path / "model"), free_port()
    args = (str(model), "--backend", "jax", "--tensor-parallel", "2", "--device", "cpu", "--kv-memory", "8M")
    with ExitStack() as running:
        servers = []
        for number, size in enumerate(("8", "4")):
            directory = tmp_path / str(number)
            directory.mkdir()
            own, env = (*args, "--max-batch-seqs", size), environment(number, port)
            servers.append(running.enter_context(live_server(directory, *own, faults="", env=env, ready=False)))
        for server in servers:
            assert server.process.wait(120) == 1
            assert "max_batch_seqs (8 on host 0, 4 on host 1)" in server.log_text


def engine_of(server: int) -> int:
    """The engine's process, below a server's: the one that has JAX."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    [engine] = [int(child) for child in children if "jaxlib" in Path(f"/proc/{child}/maps").read_text()]
    return engine


def until_answered(client: httpx.Client, body: dict[str, object]) -> Any:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        answer = client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            return answer.json()
        time.sleep(0.5)
    raise AssertionError(answer.text)


def agreement(*facts: dict[str, str]) -> list[list[str]]:
    """What each of several processes hears, given the facts that it has."""
    port = free_port()
    processes = [start(number, port, jax_agreement.__file__, json.dumps(own)) for number, own in enumerate(facts)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(facts), outputs
    return [output.splitlines() for output, _ in outputs]


@pytest.mark.full
def test_hosts_with_the_same_settings_agree_and_run_one_model() -> None:
    facts = {"jax": "1.2.3", "weights": "a digest", "XLA_FLAGS": ""}
    for heard in agreement(facts, facts):
        assert heard[0] == "agreed"
        assert "run one model together, and have loaded one" in heard[1]


@pytest.mark.full
def test_differing_hosts_all_report_the_difference() -> None:
    """They would have waited for each other for ever, or computed nonsense."""
    facts = {"jax": "1.2.3", "max_batch_seqs": "8", "model": "x" * 100}
    for [heard] in agreement(facts, {**facts, "max_batch_seqs": "16", "model": "y" * 100, "new": "fact"}):
        assert "max_batch_seqs (8 on host 0, 16 on host 1)" in heard
        assert "new (none on host 0, fact on host 1)" in heard
        assert ", model (" in heard
        assert "jax" not in heard


def test_a_step_without_a_lost_follower_can_be_tried_again_after_a_restart() -> None:
    """It was a ModelError, which is final if it happens while the engine warms up."""
    programs, rows = Programs(make_mesh(1)), jax.ShapeDtypeStruct((2,), np.float32)
    key = ("negative",)
    programs.add(Recipe(key=key, function=jnp.negative, arguments=(rows,), specs=(COPIED,), results=COPIED))
    connection, follower = socket.socketpair()
    with connection:
        leading = LeadingPrograms(programs, [connection], {key: 0})
        with follower:
            assert leading[key](np.ones(2, np.float32)).tolist() == [-1, -1]
            before = leading.failure
        gone = "A process of the mesh is gone. All of them have to start again."
        assert (before, leading.failure) == (None, gone)
        with pytest.raises(
            Unavailable, match=r"A process of the mesh is gone \(.+\)\. All of them have to start again"
        ):
            leading[key](np.ones(2, np.float32))


class LostCoordinator:
    """JAX's client after the coordinator has gone."""

    def key_value_set(self, key: str, value: str) -> None:
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses\nmore")


def test_a_coordinator_that_is_lost_before_hosts_agree_makes_them_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_state, "client", LostCoordinator())
    monkeypatch.setattr(global_state, "num_processes", 2)
    with pytest.raises(Unavailable, match=r"gone \(UNAVAILABLE: failed to connect to all addresses\)"):
        agree("settings", {})


def test_weights_are_recognised_by_any_part_that_is_looked_at(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(bytes(3_000_000))
    files[1].write_bytes(b"short")
    digest = weights_digest(files)
    copies = [tmp_path / "other a", tmp_path / "other b"]
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    assert weights_digest(copies) == digest
    for path, position in ((copies[0], 0), (copies[0], 2_999_999), (copies[1], 2)):
        before = path.read_bytes()
        path.write_bytes(before[:position] + b"x" + before[position + 1 :])
        assert weights_digest(copies) != digest
        path.write_bytes(before)
    copies[0].write_bytes(bytes(3_000_001))
    assert weights_digest(copies) != digest


def test_adapters_are_recognised_by_their_weights() -> None:
    a, b = np.ones((2, 8), np.float32), np.ones((4, 2), np.float32)
    digest = adapters_digest({"x": {"up": LowRank(a, b, 1.0)}})
    assert adapters_digest({"x": {"up": LowRank(a.copy(), b.copy(), 1.0)}}) == digest
    for other in (LowRank(a, 2 * b, 1.0), LowRank(a, b, 2.0)):
        assert adapters_digest({"x": {"up": other}}) != digest

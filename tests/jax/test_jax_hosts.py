"""One mesh over two processes, as on two hosts: they meet over the loopback device."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import jax_host
import pytest
from jax_host import CONFIG, DEVICES, answers
from jax_models import jax_runner
from live_server import live_server
from model_directory import write_model
from native_models import savable_model

from ostro import LLM, EngineConfig, SamplingParams
from ostro.errors import BadRequest
from ostro.runner.jax.hosts import ADDRESS, COUNT, NUMBER, join_hosts

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


def start(number: int, port: int) -> "subprocess.Popen[str]":
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment(number, port)
    command = [sys.executable, jax_host.__file__, str(DEVICES // PROCESSES)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one() -> None:
    port = free_port()
    processes = [start(number, port) for number in range(PROCESSES)]
    try:
        output, errors = processes[0].communicate(timeout=300)
        assert processes[0].returncode == 0, errors
        _, errors = processes[1].communicate(timeout=60)
        assert processes[1].returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    expected = answers(jax_runner(CONFIG, savable_model(CONFIG), tp=DEVICES))
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
        os.kill(engine_of(second.process.pid), signal.SIGKILL)
        assert client.post("/v1/completions", json=body | settings).status_code == 503
        answer = until_answered(client, body | settings)
        assert answer["choices"][0]["text"] == expected.choices[0].text


def engine_of(server: int) -> int:
    """The engine's process, below a server's: the one that has JAX."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    [engine] = [int(child) for child in children if "jaxlib" in Path(f"/proc/{child}/maps").read_text()]
    return engine


def until_answered(client: httpx.Client, body: dict[str, object]) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        answer = client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            return answer.json()
        time.sleep(0.5)
    raise AssertionError(answer.text)


def test_a_process_without_others_is_left_alone() -> None:
    join_hosts({"TPU_WORKER_HOSTNAMES": "localhost"})


def test_a_number_of_processes_that_is_none_is_refused() -> None:
    with pytest.raises(BadRequest, match="JAX_NUM_PROCESSES is 'two'"):
        join_hosts({ADDRESS: "127.0.0.1:1", COUNT: "two"})

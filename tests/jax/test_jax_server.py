"""`ostro serve --backend jax` as a process, on two virtual devices of the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model

from ostro import LLM, EngineConfig, SamplingParams

# All programs are compiled, by a process of its own.
pytestmark = pytest.mark.full

PROMPT = "the quick brown fox"
SIZES = ("--max-batch-seqs", "8", "--max-batch-tokens", "64", "--kv-memory", "8M")
NUM_PROGRAMS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two heads of queries, one of keys and values. Its context is long: a stream must not end before it is cut."""
    return write_model(tmp_path_factory.mktemp("model"), context=20_000)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("server")
    # Compiling takes most of the time of this test.
    env = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "OSTRO_CACHE": str(directory / "cache")}
    args = (str(model), "--backend", "jax", "--tensor-parallel", "2", "--device", "cpu", *SIZES)
    with live_server(directory, *args, faults="", env=env, cold=True) as server:
        yield server


@pytest.mark.slow
def test_the_command_line_generates_what_torch_generates(model: Path, tmp_path: Path) -> None:
    def generated(*args: str) -> str:
        command = [sys.executable, "-m", "ostro", "generate", "--model", str(model), *SIZES, "--device", "cpu", *args]
        command += ["--max-tokens", "12", "--ignore-eos", "--seed", "5", PROMPT]
        environment = {**os.environ, "OSTRO_CACHE": str(tmp_path)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    expected = generated("--backend", "torch")
    assert expected
    assert generated("--backend", "jax", "--tensor-parallel", "2") == expected


def messages(server: LiveServer) -> list[str]:
    return [json.loads(line).get("message", "") for line in server.log_text.splitlines() if line.startswith("{")]


def programs(server: LiveServer, verb: str) -> list[str]:
    return [message for message in messages(server) if message.startswith("program ") and f" {verb} after " in message]


def completion(client: httpx.Client, **settings: object) -> list[str]:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **settings}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_it_answers_what_torch_answers(server: LiveServer, model: Path) -> None:
    torch = LLM(str(model), config=EngineConfig(backend="torch", device="cpu", kv_memory=8 << 20))
    kinds: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3, "n": 2},
        {"temperature": 0.8, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    with server.client() as client:
        for settings in kinds:
            params = SamplingParams(max_tokens=12, ignore_eos=True, **settings)  # type: ignore[arg-type]
            [expected] = torch.generate([PROMPT], params)
            assert completion(client, **settings) == [choice.text for choice in expected.choices]


def test_it_tells_of_its_devices_and_programs(server: LiveServer) -> None:
    compiled = programs(server, "compiled")
    assert len(compiled) == NUM_PROGRAMS
    assert compiled[0].startswith(f"program 1 of {NUM_PROGRAMS} compiled after ")
    assert ": step of 8 tokens" in compiled[0]
    with server.client() as client:
        completion(client, temperature=1.0, n=3)
        health = client.get("/health").json()
        assert (health["device"], health["devices"], health["backend"]) == ("cpu", 2, "jax (cpu, 2 devices)")
        metrics = {name: float(value) for name, value in samples(client.get("/metrics").text)}
    assert metrics["ostro_programs"] == NUM_PROGRAMS
    assert metrics["ostro_devices"] == 2
    assert metrics["ostro_recompiles_total"] == 0
    assert metrics["ostro_compile_seconds_total"] > 0


def samples(text: str) -> Iterator[tuple[str, str]]:
    """Metrics of models, without labels."""
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name.startswith("ostro_") and rest:
            yield name, rest.rpartition(" ")[2]


def test_a_killed_engine_fails_its_streams_at_once_and_comes_back_with_the_programs_it_has(server: LiveServer) -> None:
    [engine] = [
        int(child)
        for child in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        if "engine_process" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    body = {"prompt": PROMPT, "max_tokens": 15_000, "ignore_eos": True, "stream": True, "temperature": 0}
    with server.client() as client:
        expected = completion(client, temperature=0)
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            killed = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert time.monotonic() - killed < 5
        assert any('"error"' in line for line in rest[-2:])
        deadline = time.monotonic() + 120
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, server.log_text
            time.sleep(0.1)
        assert completion(client, temperature=0) == expected
        assert client.get("/health").json()["restarts"] == 1
    assert len(programs(server, "loaded")) == NUM_PROGRAMS

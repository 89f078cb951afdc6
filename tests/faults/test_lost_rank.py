"""A rank that dies takes its engine down at once, and nothing else: streams are told, and the engine comes back."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

PROMPT = {"prompt": "the quick brown fox", "temperature": 0}


def ranks_of(server: LiveServer) -> list[int]:
    """The processes below the server that are ranks."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            if b"ostro.backends.rank_process" in (directory / "cmdline").read_bytes() and is_below(directory, server):
                found.append(int(directory.name))
        except (OSError, ValueError):
            continue
    return found


def is_below(process: Path, server: LiveServer) -> bool:
    while (parent := int((process / "stat").read_text().rpartition(")")[2].split()[1])) > 1:
        if parent == server.process.pid:
            return True
        process = Path(f"/proc/{parent}")
    return False


def until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)


def until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline, "the engine did not come back"
        time.sleep(0.1)


def completion(client: httpx.Client) -> str:
    answer = client.post("/v1/completions", json={**PROMPT, "max_tokens": 12})
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.full
def test_a_killed_rank_fails_its_streams_and_the_engine_is_back(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", heads=4, context=4096)
    plain = ("--backend", "torch", "--device", "cpu", "--threads", "1")
    with live_server(tmp_path, str(model), *plain, faults="") as alone, alone.client() as client:
        expected = completion(client)
    with live_server(tmp_path, str(model), *plain, "--tensor-parallel", "2", faults="") as server:
        with server.client() as client:
            assert completion(client) == expected
            [rank] = ranks_of(server)
            asked = {**PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as stream:
                lines = (line for line in stream.iter_lines() if line)
                next(lines)
                os.kill(rank, signal.SIGKILL)
                killed = time.monotonic()
                *_, told, done = lines
            assert time.monotonic() - killed < 30
            assert "error" in json.loads(told.removeprefix("data: "))
            assert done == "data: [DONE]"
            until_ready(client)
            assert completion(client) == expected
            [again] = ranks_of(server)
            assert again != rank
            assert "Rank 1 of 2 ended (killed by SIGKILL)" in server.log_text
        [rank] = ranks_of(server)
    until_gone(rank)


@pytest.mark.slow
def test_an_idle_engine_notices_by_itself_that_a_rank_is_gone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", heads=4)
    args = ("--backend", "torch", "--device", "cpu", "--threads", "1", "--tensor-parallel", "2")
    with live_server(tmp_path, str(model), *args, faults="") as server, server.client() as client:
        [rank] = ranks_of(server)
        os.kill(rank, signal.SIGKILL)
        until_gone(rank)
        while ranks_of(server) in ([], [rank]):
            time.sleep(0.05)
        until_ready(client)
        assert completion(client)


@pytest.mark.slow
def test_ranks_end_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", heads=4)
    args = ("--backend", "torch", "--device", "cpu", "--threads", "1", "--tensor-parallel", "2")
    with live_server(tmp_path, str(model), *args, faults="") as server:
        [rank] = ranks_of(server)
        engine = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(engine, signal.SIGKILL)
        until_gone(rank)

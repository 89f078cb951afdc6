"""A wall clock that jumps by hours, back and forth, at every reading: nothing expires early or late, nothing waits for
ever, and no figure is absurd. `tests/test_clocks.py` lists who reads that clock.
"""

import time
from collections.abc import Iterator

import httpx
import pytest
from crash_shim import build_shim, needs_shim
from live_server import LiveServer, live_server
from model_directory import write_model

pytestmark = [needs_shim, pytest.mark.full]

HOURS = 10 * 3600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("clock")
    env = {"LD_PRELOAD": str(build_shim(directory)), "LD_CRASH_JUMP": str(HOURS)}
    arguments = (str(write_model(directory / "model")), "--idle-timeout", "3600", "--request-timeout", "60")
    with live_server(directory, *arguments, env=env, cold=True) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_the_clock_does_jump(client: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    dates = [client.post("/v1/completions", json=body).json()["created"] for _ in range(8)]
    assert max(abs(date - time.time()) for date in dates) > HOURS / 2


def test_requests_and_streams_are_served(client: httpx.Client) -> None:
    for stream in (False, True):
        for _ in range(5):
            answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 8, "stream": stream})
            assert answer.status_code == 200, answer.text
            assert "error" not in answer.text
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200


def test_stored_responses_stay_and_end_after_they_began(client: httpx.Client) -> None:
    for _ in range(4):
        made = client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 400}).json()
        kept = client.get(f"/v1/responses/{made['id']}")
        assert kept.status_code == 200, kept.text
        if made["completed_at"] is not None:
            assert made["completed_at"] >= made["created_at"]
        more = client.post("/v1/responses", json={"input": "on", "previous_response_id": made["id"]})
        assert more.status_code == 200, more.text


def test_figures_stay_sane(client: httpx.Client, server: LiveServer) -> None:
    client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 8})
    [model] = client.get("/admin/stats").json()["models"]
    assert model["state"] == "ready"
    assert 0 <= model["idle_seconds"] < 600
    sums = [line for line in client.get("/metrics").text.splitlines() if "_seconds_sum" in line]
    assert sums
    assert all(0 <= float(line.rpartition(" ")[2]) < 600 for line in sums)
    assert "restart" not in server.log_text
    assert "Traceback" not in server.log_text

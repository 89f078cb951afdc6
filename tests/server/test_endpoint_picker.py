"""A server as the endpoint pickers of inference gateways see it: the names, types and meaning of a few metrics; and two
servers behind a picker and a gateway, both played here by their published protocols.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

QUEUED, RUNNING, KV = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
SIZES = "vllm:cache_config_info"
DESTINATION = "x-gateway-destination-endpoint"
# What clients call the gateway.
NAME = "inference.example"
# Two sequences are all that a step takes.
BATCH = 2
LONG = {"prompt": "the fox " * 40, "max_tokens": 7000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def started(directory: Path, model: Path) -> Iterator[LiveServer]:
    options = (
        "--max-batch-size",
        str(BATCH),
        "--max-seq-len",
        "8192",
        "--allowed-hosts",
        NAME,
        "--drain-timeout",
        "60",
    )
    with live_server(directory, str(model), *options, faults="fake,step_seconds=0.01") as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveServer]:
    with started(tmp_path_factory.mktemp("server"), model) as server:
        yield server


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveServer]:
    with started(tmp_path_factory.mktemp("other"), model) as server:
        yield server


def endpoint(server: LiveServer) -> str:
    return server.url.removeprefix("http://")


def scraped(at: str) -> dict[str, Sample]:
    """By name, the only sample of each gauge that a picker asks for. Pickers call pods by address, and send no key."""
    families = list(text_string_to_metric_families(httpx.get(f"http://{at}/metrics", trust_env=False).text))
    asked = [each for each in families if each.name in (QUEUED, RUNNING, KV, SIZES)]
    assert {each.type for each in asked} == {"gauge"}
    assert all(len(each.samples) == 1 for each in asked)
    return {each.name: each.samples[0] for each in asked}


def until(server: LiveServer, *, running: int, queued: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        found = scraped(endpoint(server))
        uses_kv = 0 < found[KV].value <= 1
        if (found[RUNNING].value, found[QUEUED].value, uses_kv) == (running, queued, running > 0):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@contextmanager
def load(server: LiveServer, num_requests: int) -> Iterator[None]:
    """Runs `num_requests` streams until the block is left; the server is idle then."""

    def stream() -> None:
        with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            assert response.status_code == 200
            for _ in response.iter_lines():
                if over.is_set():
                    return

    over = threading.Event()
    clients = [threading.Thread(target=stream) for _ in range(num_requests)]
    for client in clients:
        client.start()
    try:
        running = min(num_requests, BATCH)
        until(server, running=running, queued=num_requests - running)
        yield
    finally:
        over.set()
        for client in clients:
            client.join(60)
    until(server, running=0, queued=0)


def test_an_idle_server_has_nothing_queued_running_or_in_use(server: LiveServer) -> None:
    found = scraped(endpoint(server))
    assert [found[name].value for name in (QUEUED, RUNNING, KV)] == [0, 0, 0]
    labels = found[SIZES].labels
    assert int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) == 4096


def test_load_shows_in_the_queue_the_batch_and_the_cache(server: LiveServer) -> None:
    with load(server, 5):
        found = scraped(endpoint(server))
    assert (found[RUNNING].value, found[QUEUED].value) == (2, 3)


def test_both_apis_of_the_protocol_answer(server: LiveServer) -> None:
    with server.client() as client:
        texts: list[httpx.Response] = [
            client.post("/v1/completions", json={"model": "tiny", "prompt": "the fox", "max_tokens": 2}),
            client.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2},
            ),
        ]
    assert [each.status_code for each in texts] == [200, 200]


# --- a picker and a gateway -----------------------------------------------------------------------------------------


def picked(pool: Sequence[LiveServer]) -> list[str]:
    """Endpoints, best first. Scores are llm-d's queue-scorer and kv-cache-utilization-scorer, equally weighted."""
    metrics = {at: scraped(at) for at in map(endpoint, pool)}
    queues = {at: found[QUEUED].value for at, found in metrics.items()}
    shortest, longest = min(queues.values()), max(queues.values())

    def score(at: str) -> float:
        by_queue = 1.0 if shortest == longest else (longest - queues[at]) / (longest - shortest)
        return by_queue + (1 - metrics[at][KV].value)

    return sorted(metrics, key=score, reverse=True)


def forwarded(at: str, *, host: str = NAME) -> httpx.Response:
    """A client's request as a gateway passes it on: with the client's Host and the picker's headers."""
    headers = {"host": host, DESTINATION: at, "x-llm-d-inference-objective": "interactive"}
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 2}
    return httpx.post(f"http://{at}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


@pytest.mark.full
def test_a_server_where_none_wait_is_picked(server: LiveServer, other: LiveServer) -> None:
    for busy, idle in ((server, other), (other, server)):
        with load(busy, BATCH + 3):
            assert picked([server, other]) == [endpoint(idle), endpoint(busy)]


@pytest.mark.full
def test_with_equal_queues_the_server_with_the_emptier_kv_cache_is_picked(
    server: LiveServer, other: LiveServer
) -> None:
    for busy, idle in ((server, other), (other, server)):
        with load(busy, 1):
            assert picked([server, other]) == [endpoint(idle), endpoint(busy)]


def test_a_gateways_request_is_answered(server: LiveServer) -> None:
    assert forwarded(endpoint(server)).status_code == HTTPStatus.OK


@pytest.mark.full
def test_a_draining_server_refuses_a_gateways_request_and_goes_on_with_its_own(model: Path, tmp_path: Path) -> None:
    """By 503, upon which gateways try the next endpoint."""
    with (
        started(tmp_path, model) as ending,
        ending.client() as client,
        client.stream("POST", "/v1/completions", json=LONG) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        ending.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while httpx.get(f"{ending.url}/readyz", trust_env=False).status_code == HTTPStatus.OK:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert forwarded(endpoint(ending)).status_code == HTTPStatus.SERVICE_UNAVAILABLE
        assert '"choices"' in next(line for line in lines if line)


def test_without_a_key_a_gateways_name_must_be_allowed(server: LiveServer) -> None:
    """A gateway passes on the name that its client called, which is not the pod's."""
    answer = forwarded(endpoint(server), host="elsewhere.example")
    assert answer.status_code == HTTPStatus.FORBIDDEN
    assert "allowed-hosts" in answer.json()["error"]["message"]

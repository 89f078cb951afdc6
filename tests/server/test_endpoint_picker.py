"""A server as the endpoint pickers of inference gateways see it: the names, types and meaning of a few metrics; and two
servers behind a picker and a gateway, both played here by their published protocols.
"""

import signal
import socket
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
    """So many streams, which go on until it is left; the server is idle then."""

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


def picked(pool: Sequence[LiveServer], subset: Sequence[str] | None = None) -> str:
    """The header that a picker sets: endpoints, best first. It chooses among those of `subset`, if a gateway gives one.

    Scores are those of llm-d's queue-scorer and kv-cache-utilization-scorer, with equal weights.
    """
    eligible = [at for at in map(endpoint, pool) if subset is None or at in subset]
    metrics = {at: scraped(at) for at in eligible}
    queues = {at: metrics[at][QUEUED].value for at in eligible}

    def score(at: str) -> float:
        shortest, longest = min(queues.values()), max(queues.values())
        by_queue = 1.0 if shortest == longest else (longest - queues[at]) / (longest - shortest)
        return by_queue + (1 - metrics[at][KV].value)

    return ",".join(sorted(eligible, key=score, reverse=True))


def forwarded(destinations: str, *, host: str = NAME) -> tuple[str | None, httpx.Response]:
    """A client's request as a gateway that retries passes it on: to the first endpoint of the header that can be
    reached and does not refuse it, with the client's Host and the picker's header. Tells who served it.
    """
    headers = {"host": host, DESTINATION: destinations, "x-llm-d-inference-objective": "interactive"}
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 2}
    for at in filter(None, destinations.split(",")):
        try:
            url = f"http://{at}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
        except httpx.ConnectError:
            continue
        if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            return at, answer
    return None, httpx.Response(HTTPStatus.SERVICE_UNAVAILABLE)


def test_a_request_goes_where_none_wait(server: LiveServer, other: LiveServer) -> None:
    for busy, idle in ((server, other), (other, server)):
        with load(busy, BATCH + 3):
            served, answer = forwarded(picked([server, other]))
        assert (served, answer.status_code) == (endpoint(idle), 200)


def test_with_equal_queues_a_request_goes_where_the_kv_cache_is_emptier(server: LiveServer, other: LiveServer) -> None:
    for busy, idle in ((server, other), (other, server)):
        with load(busy, 1):
            assert picked([server, other]) == f"{endpoint(idle)},{endpoint(busy)}"


def test_a_gateway_goes_on_to_the_next_endpoint_if_the_first_is_gone(server: LiveServer) -> None:
    with socket.socket() as bound:
        # Bound but not listening, so that nobody else answers there.
        bound.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{bound.getsockname()[1]}"
        served, answer = forwarded(f"{gone},{endpoint(server)}")
    assert (served, answer.status_code) == (endpoint(server), 200)


def test_a_request_that_a_draining_server_refuses_goes_to_the_next(
    server: LiveServer, model: Path, tmp_path: Path
) -> None:
    with (
        started(tmp_path, model) as ending,
        ending.client() as client,
        client.stream("POST", "/v1/completions", json=LONG) as running,
    ):
        next(running.iter_lines())
        ending.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while httpx.get(f"{ending.url}/readyz", trust_env=False).status_code == HTTPStatus.OK:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        served, answer = forwarded(f"{endpoint(ending)},{endpoint(server)}")
    assert (served, answer.status_code) == (endpoint(server), 200)


def test_a_subset_is_kept_to_however_busy_it_is(server: LiveServer, other: LiveServer) -> None:
    with load(server, 1):
        assert picked([server, other], subset=[endpoint(server)]) == endpoint(server)
    served, answer = forwarded(picked([server, other], subset=[]))
    assert (served, answer.status_code) == (None, HTTPStatus.SERVICE_UNAVAILABLE)


def test_without_a_key_a_gateways_name_must_be_allowed(server: LiveServer) -> None:
    """A gateway passes on the name that its client called, which is not the pod's."""
    _, answer = forwarded(endpoint(server), host="elsewhere.example")
    assert answer.status_code == HTTPStatus.FORBIDDEN
    assert "allowed-hosts" in answer.json()["error"]["message"]

"""A server as the endpoint pickers of inference gateways read it: the names, types and meaning of a few metrics."""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, live_server
from model_directory import write_model
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

QUEUED, RUNNING, KV = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
SIZES = "vllm:cache_config_info"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    options = ("--max-batch-size", "2", "--max-seq-len", "8192")
    faults = "fake,step_seconds=0.01"
    with live_server(tmp_path_factory.mktemp("server"), str(model), *options, faults=faults) as server:
        yield server


def scraped(server: LiveServer) -> dict[str, Sample]:
    """By name, the only sample of each gauge that a picker asks for."""
    with server.client() as client:
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    asked = [each for each in families if each.name in (QUEUED, RUNNING, KV, SIZES)]
    assert {each.type for each in asked} == {"gauge"}
    assert all(len(each.samples) == 1 for each in asked)
    return {each.name: each.samples[0] for each in asked}


def test_an_idle_server_has_nothing_queued_running_or_in_use(server: LiveServer) -> None:
    found = scraped(server)
    assert [found[name].value for name in (QUEUED, RUNNING, KV)] == [0, 0, 0]
    labels = found[SIZES].labels
    assert int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) == 4096


def test_load_shows_in_the_queue_the_batch_and_the_cache(server: LiveServer) -> None:
    def stream() -> None:
        body = {"prompt": "the fox " * 40, "max_tokens": 7000, "ignore_eos": True, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            for _ in response.iter_lines():
                if seen.is_set():
                    return

    seen = threading.Event()
    clients = [threading.Thread(target=stream) for _ in range(5)]
    for client in clients:
        client.start()
    try:
        deadline = time.monotonic() + 60
        while True:
            found = scraped(server)
            # Two sequences are all that a step takes.
            if (found[RUNNING].value, found[QUEUED].value) == (2, 3) and 0 < found[KV].value <= 1:
                break
            assert time.monotonic() < deadline, found
    finally:
        seen.set()
        for client in clients:
            client.join(60)


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

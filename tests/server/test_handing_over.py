"""Servers that hand prompts over: one computes them, another goes on, and whatever fails costs no request."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from every_family import config_of
from family_case import SIZES
from live_server import LiveServer, live_server
from model_directory import write_model
from native_directory import write

from ostro.errors import BadRequest
from ostro.server.settings import Given, read_settings

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "ran", "home")
PROMPT = " ".join(WORDS[at * at % 9] for at in range(40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("handing over") / "model")


@contextmanager
def server(directory: Path, model: Path, name: str, *args: str, shared: str = "shared") -> Iterator[LiveServer]:
    place = directory / name
    place.mkdir()
    settings = ("--threads", "1", "--kv-shared", str(directory / shared))
    with live_server(place, f"model={model}", *settings, *args, faults="") as live:
        yield live


@contextmanager
def prefill(directory: Path, model: Path, *args: str, shared: str = "shared") -> Iterator[LiveServer]:
    with server(directory, model, "prefill", "--role", "prefill", *args, shared=shared) as live:
        yield live


@contextmanager
def decode(directory: Path, model: Path, url: str, *args: str, shared: str = "shared") -> Iterator[LiveServer]:
    settings = ("--role", "decode", "--prefill-url", url, "--prefill-min-tokens", "24")
    with server(directory, model, "decode", *settings, *args, shared=shared) as live:
        yield live


def complete(live: LiveServer, prompt: str = PROMPT, **fields: object) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    with live.client() as client:
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(live: LiveServer, name: str) -> float:
    with live.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.full
def test_a_prompt_of_a_model_with_recurrent_states_is_handed_over_with_its_state(tmp_path: Path) -> None:
    """Only the tokens behind the last page boundary are computed by the decode server."""
    directory = write_model(tmp_path / "model")
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    write(directory, config_of("qwen3_5", {**SIZES, "vocab_size": vocabulary, "max_position_embeddings": 256}))
    with prefill(tmp_path, directory) as first, decode(tmp_path, directory, first.url) as second:
        cold, _ = complete(first, PROMPT)
        text, cached = complete(second)
        assert text == cold
        assert cached >= 32
        assert cached % 16 == 0
        assert metric(second, "ostro_remote_prefills_total") == 1
        assert metric(second, "ostro_remote_prefills_failed_total") == 0
        wait_for(second, "ostro_states_fetched_total")


@pytest.mark.full
def test_a_decode_server_goes_on_from_what_a_prefill_server_has_computed(model: Path, tmp_path: Path) -> None:
    with prefill(tmp_path, model) as first, decode(tmp_path, model, first.url) as second:
        cold, _ = complete(first, PROMPT)
        other = f"home {PROMPT}"
        text, cached = complete(second)
        assert text == cold
        assert cached >= 32
        assert metric(second, "ostro_remote_prefills_total") == 1
        wait_for(first, "ostro_pages_offered_total")
        # What is cached here already is not asked for, nor what is too short.
        assert complete(second)[0] == cold
        complete(second, "the cat")
        assert metric(second, "ostro_remote_prefills_total") == 1
        streamed = streamed_text(second, other)
        assert streamed == complete(first, other)[0]
        assert metric(second, "ostro_remote_prefills_failed_total") == 0


def streamed_text(live: LiveServer, prompt: str) -> str:
    body = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    with live.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def wait_for(live: LiveServer, name: str) -> None:
    """An engine tells its counters twice a second, and looks for others' prefixes as often."""
    deadline = time.monotonic() + 60
    while not metric(live, name):
        assert time.monotonic() < deadline, f"{name} stays 0"
        time.sleep(0.05)


@pytest.mark.full
def test_requests_with_a_salt_are_computed_where_they_are(model: Path, tmp_path: Path) -> None:
    with prefill(tmp_path, model) as first, decode(tmp_path, model, first.url) as second:
        assert complete(second, cache_salt="mine")[1] == 0
        assert metric(second, "ostro_remote_prefills_total") == 0
        assert metric(first, "ostro_engine_steps_total") == 0


@pytest.mark.full
def test_without_its_prefill_server_a_decode_server_computes_prompts_itself(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    with decode(tmp_path, model, url) as live:
        texts = {complete(live, f"{word} {PROMPT}")[0] for word in ("cat", "mat", "home")}
        assert all(texts)
        assert metric(live, "ostro_remote_prefills_failed_total") >= 1
        assert live.log_text.count("they are computed here") == 1


@pytest.mark.full
def test_a_prefill_server_that_hangs_or_refuses_costs_no_request(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with decode(tmp_path, model, url, "--prefill-timeout", "0.3") as live:
            assert complete(live)[0]
            assert metric(live, "ostro_remote_prefills_failed_total") == 1
    (tmp_path / "closed").mkdir()
    keys = ("--api-key", "secret")
    with (
        prefill(tmp_path / "closed", model, *keys) as first,
        decode(tmp_path / "closed", model, first.url) as second,
    ):
        assert complete(second)[1] == 0
        assert "status 401" in second.log_text


@pytest.mark.full
def test_keys_open_a_prefill_server(model: Path, tmp_path: Path) -> None:
    with (
        prefill(tmp_path, model, "--api-key", "secret") as first,
        decode(tmp_path, model, first.url, "--prefill-key", "secret") as second,
    ):
        assert complete(second)[1] >= 32
        assert "secret" not in second.log_text


@pytest.mark.full
def test_servers_that_share_nothing_answer_all_the_same(model: Path, tmp_path: Path) -> None:
    with prefill(tmp_path, model, shared="one") as first, decode(tmp_path, model, first.url, shared="other") as second:
        assert complete(second) == (complete(first)[0], 0)
        assert metric(second, "ostro_remote_prefills_failed_total") == 1
        assert "compare kv_shared" in second.log_text


@pytest.mark.full
def test_a_client_that_leaves_while_its_prompt_is_computed_elsewhere_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        with decode(tmp_path, model, f"http://127.0.0.1:{silent.getsockname()[1]}") as live:
            host, port = live.url.removeprefix("http://").split(":")
            body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 8}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(body)
            with socket.create_connection((host, int(port))) as client:
                client.sendall(head + body)
                asked, _ = silent.accept()
                asked.settimeout(60)
                assert asked.recv(1)
            with asked:
                # Ends when the server gives the request up.
                while asked.recv(4096):
                    pass
            assert complete(live, "the cat sat")[0]


def test_prefill_reports_the_pages_that_others_find(model: Path, tmp_path: Path) -> None:
    with prefill(tmp_path, model) as live, live.client() as client:
        response = client.post("/prefill", json={"prompts": [PROMPT, "the"]})
        assert response.status_code == 200, response.text
        found = response.json()["num_tokens"]
        assert found[0] >= 32
        assert found[1] == 0
        assert client.post("/prefill", json={"prompts": []}).status_code == 400
        assert client.post("/prefill", json={"prompts": [PROMPT], "temperature": 1}).status_code == 400


@pytest.mark.full
def test_other_servers_compute_no_prompts_for_others(model: Path, tmp_path: Path) -> None:
    with server(tmp_path, model, "both") as live, live.client() as client:
        response = client.post("/prefill", json={"prompts": [PROMPT]})
        assert response.status_code == 403
        assert "--role prefill" in response.json()["error"]["message"]


@pytest.mark.full
def test_a_server_that_drains_shares_its_prefixes_while_its_last_request_runs(model: Path, tmp_path: Path) -> None:
    with (
        server(tmp_path, model, "old", "--drain-timeout", "60") as old,
        server(tmp_path, model, "new") as new,
        old.client() as client,
    ):
        cold, _ = complete(old)
        body = {"model": "model", "prompt": "a mat", "max_tokens": 200, "n": 8, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(old.process.pid, signal.SIGTERM)
            # The stream is not read to its end, and so the old server cannot have stopped.
            wait_for(new, "ostro_pages_shared")
            text, cached = complete(new)
            assert text == cold
            assert cached >= 32
            rest = list(lines)
        assert "data: [DONE]" in rest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "prefill"}, "role prefill needs kv_shared"),
        ({"role": "decode", "kv_shared": "x"}, "role decode needs prefill_url"),
        ({"prefill_url": "http://127.0.0.1:1"}, "prefill_url is for role decode"),
        ({"prefill_min_tokens": 9}, "prefill_min_tokens is for role decode"),
        ({"prefill_key": "secret"}, "prefill_key is for role decode"),
        ({"role": "other"}, "role"),
        ({"role": "decode", "kv_shared": "x", "prefill_url": "prefill:8000"}, "prefill_url"),
        ({"role": "decode", "kv_shared": "x", "prefill_url": "http://a", "prefill_key": "a,b"}, "prefill_key"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(given: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=message):
        read_settings({name: Given(value, f"--{name}") for name, value in given.items()}, directory=tmp_path)

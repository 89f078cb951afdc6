"""What is refused, how, and that nobody else notices."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from live_server import LiveServer, live_server
from sse_events import events_of

from ostro.schemas.fields import MAX_TOKENS

HELLO = [{"role": "user", "content": "Say hello."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("errors"), "--max-body-size", "1M") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert "/src/" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("POST", "/embeddings", "/v1/embeddings"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/default", "/v1/models/default"),
        ("GET", "/completions", "/v1/completions"),
        ("GET", "/v1/v1/models", "/v1/models"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "//v1/completions", "/v1/completions"),
        ("POST", "/tokenize/", "/tokenize"),
    ],
)
def test_a_path_that_is_nearly_right_is_put_right(client: httpx.Client, method: str, path: str, meant: str) -> None:
    error = error_of(client.request(method, client.base_url.join("/").copy_with(raw_path=path.encode())), 404)
    assert error["message"] == f"There is no {path} here. Did you mean {meant}?"


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/chat"), ("GET", "/api/tags"), ("GET", "/api")])
def test_ollama_clients_get_a_text_that_names_what_is_spoken(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 404
    message = answer.json()["error"]
    assert isinstance(message, str)
    assert "/v1" in message


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v2/models/x"])
def test_another_path_names_the_right_one(client: httpx.Client, path: str) -> None:
    assert error_of(client.get(path), 404)["message"] == f"There is no {path} here. GET /docs lists the endpoints."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_bad_field_is_named(client: httpx.Client, fields: dict[str, object], param: str) -> None:
    error = error_of(client.post(CHAT, json={"messages": HELLO, **fields}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":1}x',
    ],
)
def test_malformed_body_is_a_400(client: httpx.Client, body: bytes) -> None:
    error_of(client.post(COMPLETIONS, content=body, headers=JSON), 400)


def test_body_that_is_not_called_json_is_a_415(client: httpx.Client) -> None:
    error = error_of(client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}), 415)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_a_413(client: httpx.Client, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'
    content: bytes | Iterator[bytes] = iter([body[:1000], body[1000:]]) if chunked else body
    error = error_of(client.post(COMPLETIONS, content=content, headers=JSON), 413)
    assert error["code"] == "body_too_large"


def test_unknown_model_is_a_404_that_names_the_right_one(client: httpx.Client) -> None:
    error = error_of(client.post(CHAT, json={"messages": HELLO, "model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(client.get("/v1/models/gpt-9"), 404)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_context_is_a_400_also_for_streams(client: httpx.Client, stream: bool) -> None:
    body = {"prompt": [5] * 9000, "max_tokens": 1, "stream": stream}
    error = error_of(client.post(COMPLETIONS, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is")


@pytest.mark.parametrize("ids", [[-1], [49152], [10**12]])
def test_token_outside_the_vocabulary_is_a_400(client: httpx.Client, ids: list[int]) -> None:
    error_of(client.post(COMPLETIONS, json={"prompt": ids}), 400)


def test_one_bad_prompt_of_many_refuses_all(client: httpx.Client) -> None:
    error_of(client.post(COMPLETIONS, json={"prompt": [[1, 2], [49152]], "stream": True}), 400)


def test_unknown_path_and_method_have_the_same_error_body(client: httpx.Client) -> None:
    assert error_of(client.get("/v1/nothing"), 404)["code"] == "not_found"
    response = client.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_model_without_embeddings_says_so(client: httpx.Client) -> None:
    assert error_of(client.post("/v1/embeddings", json={"input": "x"}), 400)["code"] == "unsupported"


def test_refusals_leave_a_stream_beside_them_alone(client: httpx.Client, server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
    alone = client.post(COMPLETIONS, json=body).text
    with client.stream("POST", COMPLETIONS, json=body) as response, server.client() as other:
        for bad in ({"prompt": [49152]}, {"prompt": "x", "n": -1}, {}, {"prompt": [5] * 9000}):
            error_of(other.post(COMPLETIONS, json=bad), 400)
        beside = "".join(response.iter_text())
    assert [text(beside), text(alone)] == [text(alone)] * 2


def text(stream: str) -> str:
    return "".join(choice["text"] for event in events_of(stream) for choice in event["choices"])


# --- clients that go, and engines that do -----------------------------------------------------------------------------


def requests_under_way(client: httpx.Client) -> int:
    count: int = client.get("/health").json()["requests"]
    return count


def until_idle(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while requests_under_way(client):
        assert time.monotonic() < deadline, "the engine still works for a client that has gone"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_hangs_up_ends_its_request(tmp_path_factory: pytest.TempPathFactory, stream: bool) -> None:
    with (
        live_server(tmp_path_factory.mktemp("gone"), faults="fake,step_seconds=0.02") as server,
        server.client() as client,
    ):
        address = urlsplit(server.url)
        body = b'{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":%s}' % str(stream).lower().encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(head % len(body) + body)
            deadline = time.monotonic() + 60
            while not requests_under_way(client):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        until_idle(client)
        assert "Traceback" not in server.log_text


@pytest.mark.parametrize("stream", [False, True])
def test_engine_that_dies_is_an_error_that_is_worth_another_try(
    tmp_path_factory: pytest.TempPathFactory, stream: bool
) -> None:
    with (
        live_server(tmp_path_factory.mktemp("crash"), faults="fake,crash_after=30,step_seconds=0.01") as server,
        server.client() as client,
    ):
        response = client.post(
            COMPLETIONS, json={"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": stream}
        )
        if stream:
            assert response.status_code == 200
            *chunks, last = events_of(response.text)
            assert chunks
            assert set(last["error"]) == {"message", "type", "param", "code"}
            assert last["error"]["code"] == "unavailable"
        else:
            assert error_of(response, 503)["code"] == "unavailable"
            assert int(response.headers["retry-after"]) >= 1
        assert "Traceback" not in server.log_text


def test_compressed_body_is_a_415(client: httpx.Client) -> None:
    """It was read as it stood, and was no JSON."""
    headers = {**JSON, "content-encoding": "gzip"}
    response = client.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert "Content-Encoding" in error_of(response, 415)["message"]


def ids_body(count: int) -> bytes:
    return b'{"prompt":[' + b",".join([b"1"] * count) + b"]}"


@pytest.mark.full
def test_as_many_token_ids_are_read_as_the_schema_allows_and_more_are_refused_with_advice(client: httpx.Client) -> None:
    """The schema spoke of four million, and a body of half a million and some was refused without a number."""
    assert len(ids_body(MAX_TOKENS)) <= MEGABYTE
    within = error_of(client.post(COMPLETIONS, content=ids_body(MAX_TOKENS), headers=JSON), 400)
    assert within["code"] == "context_length_exceeded"
    beyond = error_of(client.post(COMPLETIONS, content=ids_body(524_280), headers=JSON), 413)
    assert str(MAX_TOKENS) in beyond["message"]
    assert "as text" in beyond["message"]


@pytest.mark.full
def test_error_within_a_stream_is_in_the_log(tmp_path: Path) -> None:
    """Its status is 200, and the line said nothing else."""
    # Long enough for a first token on a busy machine, and far shorter than the answer.
    args = ("--request-timeout", "4")
    with live_server(tmp_path, *args, faults="fake,step_seconds=0.05") as slow, slow.client() as client:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        assert '"code":"timeout"' in client.post(COMPLETIONS, json=body).text
    [line] = [each for each in map(json.loads, slow.log_text.splitlines()) if each.get("path") == COMPLETIONS]
    assert (line["status"], line["error"]) == (200, "timeout")


@pytest.mark.full
def test_tokenising_counts_as_a_request_like_others(tmp_path: Path) -> None:
    """It passed by the gate: nothing bounded how many were under way, or waited for them at the end."""
    args = ("--max-concurrent-requests", "1", "--max-queue-requests", "0")
    with live_server(tmp_path, *args, faults="fake,step_seconds=0.05") as slow, slow.client() as client:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as busy:
            parts = busy.iter_bytes()
            next(parts)
            with slow.client() as other:
                for path, given in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
                    refused = other.post(path, json=given)
                    assert error_of(refused, 429)["code"] == "queue_full"
                    assert int(refused.headers["retry-after"]) >= 1

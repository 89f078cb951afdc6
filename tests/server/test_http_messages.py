"""/v1/messages over a real socket, with the fake runner behind it; by the Anthropic client too where it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dialect_calls import CHAT, MESSAGES, answered, events, refused
from live_server import LiveServer, live_server

from ostro.schemas.messages import AssistantMessage

Json = dict[str, Any]

HELLO = [{"role": "user", "content": "Hello"}]
BASE: Json = {"model": "default", "messages": HELLO, "max_tokens": 6, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("messages"), "--max-new-tokens", "500") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def create(client: httpx.Client, **body: object) -> Json:
    message = answered(client, MESSAGES, **BASE | body)
    AssistantMessage.model_validate(message)
    return message


def text_of(message: Json) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def test_a_message_is_the_same_streamed_and_whole(client: httpx.Client) -> None:
    create(client)
    whole = create(client)
    told = events(client, MESSAGES, **BASE)
    assert [event["type"] for event in told[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in told[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text_of(whole) != ""
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2]["usage"] == whole["usage"]
    assert told[0]["message"]["usage"]["cache_read_input_tokens"] == whole["usage"]["cache_read_input_tokens"] > 0
    assert whole["id"].startswith("msg_")


@pytest.mark.full
def test_the_anthropic_client_reads_both(server: LiveServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="any")
    body: Json = {"model": "default", "max_tokens": 6, "messages": HELLO, "extra_body": {"seed": 1}}
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.stop_reason == whole.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="default", messages=HELLO)
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert [model.id for model in client.models.list()] == [whole.model]
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(**body | {"extra_body": {"colour": 1}})
    assert refusal.value.body["error"]["type"] == "invalid_request_error"
    assert refusal.value.request_id.startswith("req_")


def test_a_stop_sequence_is_named(client: httpx.Client) -> None:
    text = text_of(create(client))
    stop = text[3:6]
    message = create(client, stop_sequences=["never", stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def test_the_answer_that_was_begun_is_continued(client: httpx.Client) -> None:
    begun = create(client, messages=[*HELLO, {"role": "assistant", "content": "The answer is"}])
    in_chat = answered(
        client,
        CHAT,
        messages=[*HELLO, {"role": "assistant", "content": "The answer is"}],
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=6,
        seed=1,
    )
    assert text_of(begun) == in_chat["choices"][0]["message"]["content"]
    assert (
        begun["usage"]["input_tokens"] + begun["usage"]["cache_read_input_tokens"] == in_chat["usage"]["prompt_tokens"]
    )


def test_the_header_block_that_changes_does_not_reach_the_prompt(client: httpx.Client) -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
        {"type": "text", "text": "Be kind."},
    ]
    assert text_of(create(client, system=blocks)) == text_of(create(client, system="Be kind."))


def test_a_limit_that_is_out_of_reach_is_lowered(client: httpx.Client) -> None:
    """By the server's own limit, which refuses it in the other dialects."""
    message = create(client, max_tokens=32_000, ignore_eos=True)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 500)


def test_a_limit_beyond_the_context_is_lowered_to_it(client: httpx.Client) -> None:
    long = [{"role": "user", "content": "word " * 8000}]
    message = create(client, messages=long, max_tokens=32_000, ignore_eos=True)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert sum(message["usage"].values()) == 8192


def test_tokens_are_counted_as_the_model_gets_them(client: httpx.Client) -> None:
    body: Json = {"model": "default", "messages": HELLO, "system": "Be kind."}
    counted = answered(client, f"{MESSAGES}/count_tokens", **body)
    usage = create(client, system="Be kind.")["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_every_answer_has_a_request_id(client: httpx.Client) -> None:
    for body in (BASE, BASE | {"colour": 1}):
        response = client.post(MESSAGES, json=body)
        assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.json()["request_id"] == response.headers["request-id"]
    assert "request-id" not in client.get("/v1/models").headers


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", MESSAGES, BASE | {"colour": 1}, 400, "invalid_request_error"),
        ("POST", MESSAGES, BASE | {"model": "nobody"}, 404, "not_found_error"),
        ("POST", f"{MESSAGES}/batches", {}, 404, "not_found_error"),
        ("GET", MESSAGES, None, 405, "invalid_request_error"),
        ("GET", "/v1/models/nobody", None, 404, "not_found_error"),
    ],
)
def test_errors_are_reported_in_the_dialect(
    client: httpx.Client, method: str, path: str, body: Json | None, status: int, kind: str
) -> None:
    response = client.request(method, path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == status
    told = response.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["request_id"] == response.headers["request-id"]
    assert set(told) == {"type", "error", "request_id"}


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for(client: httpx.Client) -> None:
    error = refused(client, MESSAGES, 400, **BASE | {"messages": [{"role": "user", "content": "word " * 9000}]})
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 90")
    assert error["message"].endswith("tokens > 8192 maximum")


def test_models_are_listed_in_the_dialect_that_asks(client: httpx.Client) -> None:
    listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    [model] = listed["data"]
    assert (model["type"], model["display_name"]) == ("model", model["id"])
    assert (listed["first_id"], listed["has_more"]) == (model["id"], False)
    one = client.get(f"/v1/models/{model['id']}", headers={"anthropic-version": "2023-06-01"}).json()
    assert one == model
    assert client.get("/v1/models").json()["object"] == "list"


def test_the_root_answers_to_head(client: httpx.Client) -> None:
    response = client.head("/")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.full
def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    with live_server(tmp_path, "--api-key", "secret") as server, server.client() as client:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert client.post(MESSAGES, json=BASE, headers=headers).status_code == 200
        given: list[dict[str, str]] = [{}, {"x-api-key": "wrong"}]
        for headers in given:
            response = client.post(MESSAGES, json=BASE, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.json()["request_id"] == response.headers["request-id"]
        assert client.head("/").status_code == 200


@pytest.mark.full
def test_a_server_that_is_not_ready_is_overloaded(tmp_path: Path) -> None:
    with (
        live_server(tmp_path, faults="fake,crash_after=30,step_seconds=0.01") as server,
        server.client() as client,
    ):
        told = events(client, MESSAGES, **BASE | {"max_tokens": 300, "ignore_eos": True})
        assert told[-1]["type"] == "error"
        assert told[-1]["error"]["type"] == "overloaded_error"
        assert told[-1]["request_id"].startswith("req_")

"""/v1/responses over a real socket, with the fake runner behind it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dialect_calls import RESPONSES, answered, events, events_in, output_text, refused
from live_server import LiveServer, live_server
from openai import OpenAI

from ostro.schemas.responses import ResponseObject

Json = dict[str, Any]

LONG = "word " * 9000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("responses")) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def create(client: httpx.Client, **body: object) -> Json:
    response = answered(client, RESPONSES, **{"input": "Hello", "max_output_tokens": 6, "seed": 1} | body)
    ResponseObject.model_validate(response)
    return response


def ended(client: httpx.Client, id: str) -> Json:
    """A background response, once it has ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        response: Json = client.get(f"{RESPONSES}/{id}").json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.02)
    raise AssertionError(f"{id} did not end")


def test_a_response_is_the_same_streamed_and_whole(client: httpx.Client) -> None:
    whole = create(client)
    told = events(client, RESPONSES, input="Hello", max_output_tokens=6, seed=1)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.incomplete"
    streamed = told[-1]["response"]
    assert output_text(streamed) == output_text(whole) != ""
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 6
    assert whole["id"].startswith("resp_")
    assert whole["model"] == streamed["model"] != "default"


@pytest.mark.full
def test_the_openai_client_reads_both(server: LiveServer) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="any")
    extra = {"seed": 1}
    whole = client.responses.create(model="default", input="Hello", max_output_tokens=6, extra_body=extra)
    with client.responses.stream(model="default", input="Hello", max_output_tokens=6, extra_body=extra) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text != ""
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    assert [item.type for item in client.responses.input_items.list(whole.id).data] == ["message"]
    client.responses.delete(whole.id)


def test_a_response_continues_another(client: httpx.Client) -> None:
    first = create(client, instructions="Be brief.")
    second = create(client, input="And then?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    spelt_out = create(
        client,
        input=[
            {"role": "user", "content": "Hello"},
            *first["output"],
            {"role": "user", "content": "And then?"},
        ],
    )
    # Without the first one's instructions, which are not inherited.
    assert output_text(second) == output_text(spelt_out)
    assert second["usage"]["input_tokens"] == spelt_out["usage"]["input_tokens"]
    third = create(client, input="Why?", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_two_responses_continue_one_and_find_its_prefix_cached(client: httpx.Client) -> None:
    first = create(client, input="Hello, " * 40)
    one, other = (create(client, input=text, previous_response_id=first["id"]) for text in ("Why?", "How?"))
    assert output_text(one) != output_text(other)
    assert one["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_a_streamed_response_is_stored_too(client: httpx.Client) -> None:
    told = events(client, RESPONSES, input="Hello", max_output_tokens=6, seed=1)
    final = told[-1]["response"]
    assert client.get(f"{RESPONSES}/{final['id']}").json() == final


def test_a_response_that_is_not_stored_is_not_found(client: httpx.Client) -> None:
    response = create(client, store=False)
    assert not response["store"]
    assert client.get(f"{RESPONSES}/{response['id']}").status_code == 404
    error = refused(client, RESPONSES, 400, input="Hi", previous_response_id=response["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_a_deleted_response_is_gone(client: httpx.Client) -> None:
    id = create(client)["id"]
    assert client.delete(f"{RESPONSES}/{id}").json() == {"id": id, "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        response = client.request(method, f"{RESPONSES}/{id}")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_input_items_come_page_by_page(client: httpx.Client) -> None:
    items = [{"role": "user", "content": text, "id": f"item_{text}"} for text in ("a", "b")]
    id = create(client, input=[*items, {"role": "user", "content": "c"}])["id"]
    newest = client.get(f"{RESPONSES}/{id}/input_items").json()
    assert [item["content"][0]["text"] for item in newest["data"]] == ["c", "b", "a"]
    assert not newest["has_more"]
    page = client.get(f"{RESPONSES}/{id}/input_items", params={"order": "asc", "limit": 1, "after": "item_a"}).json()
    assert [item["id"] for item in page["data"]] == ["item_b"] == [page["first_id"]] == [page["last_id"]]
    assert page["has_more"]
    for params, name in (({"limit": "0"}, "limit"), ({"after": "x"}, "after"), ({"order": "up"}, "order")):
        response = client.get(f"{RESPONSES}/{id}/input_items", params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_items_are_referred_to_by_their_ids(client: httpx.Client) -> None:
    first = create(client)
    own = {"role": "user", "content": "Hello"}
    again = {"role": "user", "content": "Why?"}
    [item] = first["output"]
    referring = create(client, input=[own, {"type": "item_reference", "id": item["id"]}, again])
    assert output_text(referring) == output_text(create(client, input=[own, item, again]))
    error = refused(client, RESPONSES, 400, input=[own, {"id": "msg_nowhere"}])
    assert error["param"] == "input[1].id"


def test_input_tokens_are_those_that_the_response_counts(client: httpx.Client) -> None:
    body: Json = {"input": "Hello", "instructions": "Be brief."}
    counted = answered(client, f"{RESPONSES}/input_tokens", **body)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": create(client, **body)["usage"]["input_tokens"],
    }


def test_a_conversation_that_is_too_long_is_refused_or_loses_its_beginning(client: httpx.Client) -> None:
    turns = [{"role": role, "content": f"{role} {LONG[:12000]}"} for role in ("user", "assistant", "user", "assistant")]
    items = [{"role": "developer", "content": "Be brief."}, *turns, *turns, {"role": "user", "content": "Why?"}]
    error = refused(client, RESPONSES, 400, input=items)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    kept = create(client, input=items, truncation="auto")
    whole = create(client, input=[items[0], *turns[2:], items[-1]])
    assert 3000 < kept["usage"]["input_tokens"] <= 8192
    assert kept["usage"]["input_tokens"] >= whole["usage"]["input_tokens"]
    error = refused(client, RESPONSES, 400, input=LONG, truncation="auto")
    assert error["code"] == "context_length_exceeded"


def test_hosted_tools_are_left_out_with_a_line_in_the_log(server: LiveServer, client: httpx.Client) -> None:
    response = create(client, tools=[{"type": "web_search"}, {"type": "code_interpreter", "container": "auto"}])
    assert response["tools"] == []
    assert output_text(response) == output_text(create(client))
    lines = [json.loads(line) for line in server.log_text.splitlines() if "dropped hosted tools" in line]
    assert [line["kinds"] for line in lines] == ["web_search, code_interpreter"]


def test_log_probabilities_come_with_the_text(client: httpx.Client) -> None:
    body: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = create(client, **body)["output"]
    logprobs = item["content"][0]["logprobs"]
    assert len(logprobs) == 6
    told = events(client, RESPONSES, input="Hello", max_output_tokens=6, seed=1, **body)
    deltas = [event["logprobs"] for event in told if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == logprobs


@pytest.mark.parametrize("path", ["/v1/responses/compact"])
def test_what_is_not_served_is_refused_by_name(client: httpx.Client, path: str) -> None:
    assert refused(client, path, 400, input="Hi")["code"] == "unsupported"


def test_errors_before_the_first_event_have_a_status(client: httpx.Client) -> None:
    assert refused(client, RESPONSES, 404, input="Hi", model="nobody", stream=True)["code"] == "model_not_found"
    assert refused(client, RESPONSES, 400, input=LONG, stream=True)["code"] == "context_length_exceeded"


# --- in the background ----------------------------------------------------------------------------------------------


def test_a_response_in_the_background_is_queued_and_then_done(client: httpx.Client) -> None:
    queued = create(client, background=True)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    done = ended(client, queued["id"])
    assert output_text(done) == output_text(create(client))
    assert done["background"]
    error = client.post(f"{RESPONSES}/{queued['id']}/cancel").json()["error"]
    assert "has ended" in error["message"]
    continued = create(client, input="Why?", previous_response_id=queued["id"])
    assert continued["usage"]["input_tokens"] > done["usage"]["input_tokens"]


def test_a_response_in_the_background_is_cancelled(client: httpx.Client) -> None:
    body = {"background": True, "ignore_eos": True, "max_output_tokens": 8000}
    id = create(client, **body)["id"]
    cancelled = client.post(f"{RESPONSES}/{id}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json()["status"] == "cancelled"
    assert client.get(f"{RESPONSES}/{id}").json()["status"] == "cancelled"
    assert client.post(f"{RESPONSES}/{id}/cancel").status_code == 400


def test_a_response_that_was_not_in_the_background_is_not_cancelled(client: httpx.Client) -> None:
    id = create(client)["id"]
    response = client.post(f"{RESPONSES}/{id}/cancel")
    assert response.status_code == 400
    assert "background" in response.json()["error"]["message"]
    assert client.get(f"{RESPONSES}/{id}", params={"stream": "true"}).json()["error"]["param"] == "stream"


def test_a_stream_in_the_background_is_replayed_from_anywhere(client: httpx.Client) -> None:
    told = events(client, RESPONSES, input="Hello", max_output_tokens=6, seed=1, background=True)
    assert [event["type"] for event in told[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    path = f"{RESPONSES}/{told[0]['response']['id']}"
    assert events_in(client.get(path, params={"stream": "true"}).text) == told
    assert events_in(client.get(path, params={"stream": "true", "starting_after": 4}).text) == told[5:]
    assert client.get(path, params={"stream": "true", "starting_after": "x"}).status_code == 400
    assert client.get(path).json() == told[-1]["response"]


def test_a_stream_in_the_background_outlives_its_client(client: httpx.Client) -> None:
    body = {"input": "Hello", "max_output_tokens": 300, "seed": 1, "ignore_eos": True}
    with client.stream("POST", RESPONSES, json=body | {"background": True, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    assert ended(client, id)["usage"]["output_tokens"] == 300


def test_a_response_in_the_background_that_cannot_run_fails(client: httpx.Client) -> None:
    queued = answered(client, RESPONSES, input=LONG, background=True)
    failed = ended(client, queued["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    told = events(client, RESPONSES, input=LONG, background=True)
    assert [event["type"] for event in told] == ["response.created", "response.queued", "response.failed"]
    assert [event["sequence_number"] for event in told] == [0, 1, 2]


def test_work_in_the_background_is_counted_and_logged(server: LiveServer, client: httpx.Client) -> None:
    headers = {"x-request-id": "req_background"}
    body = {"input": "Hello", "max_output_tokens": 6, "background": True}
    id = client.post(RESPONSES, json=body, headers=headers).json()["id"]
    ended(client, id)
    client.get(RESPONSES)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in server.log_text.splitlines() if "req_background" in line]
        counted = [line for line in lines if line.get("completion_tokens") == 6]
        if counted:
            break
        time.sleep(0.05)
    assert len(counted) == 1
    assert counted[0]["status"] == 200


# --- other servers --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_server_without_a_store_says_so(tmp_path: Path) -> None:
    with live_server(tmp_path, "--response-store", "0") as server, server.client() as client:
        response = create(client)
        assert not response["store"]
        assert client.get(f"{RESPONSES}/{response['id']}").status_code == 404
        asked: list[Json] = [{"store": True}, {"background": True}, {"previous_response_id": "resp_1"}]
        for body in asked:
            error = refused(client, RESPONSES, 400, input="Hi", **body)
            assert error["param"] == next(iter(body))
            assert "--response-store" in error["message"]


@pytest.mark.full
def test_a_key_sees_its_own_responses_only(tmp_path: Path) -> None:
    with live_server(tmp_path, "--api-key", "one,two") as server:
        with server.client(authorization="Bearer one") as client:
            id = create(client)["id"]
            assert client.get(f"{RESPONSES}/{id}").status_code == 200
        with server.client(authorization="Bearer two") as client:
            assert client.get(f"{RESPONSES}/{id}").status_code == 404
            assert client.delete(f"{RESPONSES}/{id}").status_code == 404
            assert (
                refused(client, RESPONSES, 400, input="Hi", previous_response_id=id)["param"] == "previous_response_id"
            )


@pytest.mark.full
def test_an_engine_that_dies_is_the_streams_last_event(tmp_path: Path) -> None:
    with live_server(tmp_path, faults="fake,crash_after=30,step_seconds=0.01") as server, server.client() as client:
        told = events(client, RESPONSES, input="Hello", max_output_tokens=300, ignore_eos=True)
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"]["error"]["code"] == "server_is_overloaded"
        assert [event["sequence_number"] for event in told] == list(range(len(told)))

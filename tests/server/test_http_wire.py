"""What goes over the wire, byte for byte, as clients of OpenAI's expect it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from sse_events import Chunk, streamed

from ostro.schemas.chat import ChatCompletionChunk
from ostro.schemas.completions import CompletionChunk

HELLO = [{"role": "user", "content": "Say hello."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("wire")) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def answer(client: httpx.Client, path: str, **body: object) -> Chunk:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    parsed: Chunk = response.json()
    return parsed


def text_of(chunks: list[Chunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


# --- chat, streamed -------------------------------------------------------------------------------------------------


def test_chat_stream_is_role_then_text_then_finish_reason(client: httpx.Client) -> None:
    chunks = streamed(client, CHAT, {"messages": HELLO, "max_tokens": 8})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(delta["delta"]) == {"content"} and delta["finish_reason"] is None for delta in deltas[1:-1])
    assert (deltas[-1]["delta"], deltas[-1]["finish_reason"]) == ({}, "length")
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_last_and_is_null_before(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "stream_options": {"include_usage": True}}
    *chunks, last = streamed(client, CHAT, body)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize(
    "content", ["Hello, world.", [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world."}]]
)
def test_a_prediction_changes_no_text_and_is_counted(client: httpx.Client, content: object) -> None:
    """The engine here verifies no drafts, so that nothing of the prediction is tried."""
    body = {"messages": HELLO, "max_tokens": 8, "seed": 1}
    predicted = body | {"prediction": {"type": "content", "content": content}}
    plain, helped = answer(client, CHAT, **body), answer(client, CHAT, **predicted)
    assert helped["choices"] == plain["choices"]
    assert "completion_tokens_details" not in plain["usage"]
    nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert helped["usage"]["completion_tokens_details"] == nothing
    *_, last = streamed(client, CHAT, predicted | {"stream_options": {"include_usage": True}})
    assert last["usage"]["completion_tokens_details"] == nothing


@pytest.mark.parametrize("prediction", ["Hello", {"type": "text", "content": "a"}, {"type": "content"}])
def test_a_prediction_of_another_shape_is_refused(client: httpx.Client, prediction: object) -> None:
    response = client.post(CHAT, json={"messages": HELLO, "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(("path", "given"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": ["one", "two"]})])
def test_usage_so_far_comes_with_every_event_if_asked_for(
    client: httpx.Client, path: str, given: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(client, path, {**given, "max_tokens": 5, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5 * len(given.get("prompt", [""]))
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_choices_of_a_stream_are_interleaved_and_each_has_its_role_and_end(client: httpx.Client) -> None:
    chunks = streamed(client, CHAT, {"messages": HELLO, "max_tokens": 64, "n": 3, "seed": 7})
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]
        assert sum("role" in choice["delta"] for choice in own) == 1
    assert len({text_of(chunks, index) for index in range(3)}) == 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_and_whole_answer_say_the_same(client: httpx.Client, path: str) -> None:
    prompt: dict[str, object] = {"messages": HELLO} if path == CHAT else {"prompt": "Once upon a time"}
    body = {**prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    whole = answer(client, path, **body)["choices"][0]
    text = whole["message"]["content"] if path == CHAT else whole["text"]
    # Random tokens of a byte-level vocabulary: many are pieces of characters.
    assert text_of(streamed(client, path, body)) == text
    assert len(text) > 100


def test_chat_stream_carries_the_logprobs_of_every_token(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True, "ignore_eos": True}
    chunks = streamed(client, CHAT, body)
    given = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    tokens = [entry for logprobs in given for entry in logprobs["content"]]
    assert len(tokens) == 12
    assert all(logprobs["refusal"] is None for logprobs in given)
    assert tokens == answer(client, CHAT, **body)["choices"][0]["logprobs"]["content"]


# --- completions, streamed ------------------------------------------------------------------------------------------


def test_completion_stream_has_text_and_ends_each_choice_once(client: httpx.Client) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 6, "stream_options": {"include_usage": True}}
    *chunks, last = streamed(client, COMPLETIONS, body)
    for chunk in chunks:
        CompletionChunk.model_validate(chunk)
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    assert last["usage"]["completion_tokens"] == 24


def test_echo_and_logprobs_are_the_same_streamed_or_not(client: httpx.Client) -> None:
    body = {"prompt": "naïve café", "max_tokens": 9, "temperature": 0, "logprobs": 1, "echo": True}
    whole = answer(client, COMPLETIONS, **body)["choices"][0]
    choices = [chunk["choices"][0] for chunk in streamed(client, COMPLETIONS, body)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for choice in choices for entry in choice["logprobs"][name]] == whole["logprobs"][name]


# --- completions, whole ---------------------------------------------------------------------------------------------


def test_evaluation_harness_gets_one_generated_entry_after_the_prompt(client: httpx.Client) -> None:
    prompts = [[10, 11, 12, 13], [20, 21]]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    choices = answer(client, COMPLETIONS, **body)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        for logprob, alternatives in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert logprob in alternatives.values()


def test_max_tokens_zero_with_echo_gives_the_prompt_back(client: httpx.Client) -> None:
    choice = answer(client, COMPLETIONS, prompt="Hello there", max_tokens=0, echo=True)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
    chunks = streamed(client, COMPLETIONS, {"prompt": "Hello there", "max_tokens": 0, "echo": True})
    assert text_of(chunks) == "Hello there"


def test_completions_are_16_tokens_by_default(client: httpx.Client) -> None:
    assert answer(client, COMPLETIONS, prompt="x", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_temperature_zero_is_greedy_and_null_is_the_default(client: httpx.Client) -> None:
    greedy = {answer(client, COMPLETIONS, prompt="x", temperature=0)["choices"][0]["text"] for _ in range(3)}
    default = {answer(client, COMPLETIONS, prompt="x", temperature=None)["choices"][0]["text"] for _ in range(3)}
    assert (len(greedy), len(default)) == (1, 3)


def test_seed_repeats_an_answer(client: httpx.Client) -> None:
    texts = {answer(client, COMPLETIONS, prompt="x", seed=3)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_cut_out_wherever_tokens_end(client: httpx.Client, stream: bool) -> None:
    body: dict[str, object] = {"prompt": "x", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = answer(client, COMPLETIONS, **body)["choices"][0]["text"]
    stop = text[30:36]
    expected = text[: text.index(stop)]
    body["stop"] = [stop, "never ever"]
    if stream:
        chunks = streamed(client, COMPLETIONS, body)
        assert text_of(chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = answer(client, COMPLETIONS, **body)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


def test_chat_answer_has_every_field_that_clients_read(client: httpx.Client) -> None:
    given = answer(client, CHAT, messages=HELLO, max_completion_tokens=3, n=2, user="me", temperature=None)
    assert given["object"] == "chat.completion"
    assert [choice["index"] for choice in given["choices"]] == [0, 1]
    assert all(choice["message"].keys() >= {"role", "content", "refusal"} for choice in given["choices"])
    assert given["usage"]["completion_tokens"] == 6


def test_repeated_prompt_is_counted_as_cached(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "The same words again and again. " * 8}]
    first = answer(client, CHAT, messages=messages, max_tokens=1)
    second = answer(client, CHAT, messages=messages, max_tokens=1)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_json_is_utf_8_and_not_escaped_to_ascii(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "日本語 🙂", "max_tokens": 0, "echo": True})
    assert "日本語 🙂".encode() in response.content


# --- the rest -------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found_by_every_name(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    [card] = listed["data"]
    assert listed["object"] == "list"
    assert set(card) >= {"id", "object", "created", "owned_by", "permission", "root", "parent"}
    assert client.get(f"/v1/models/{card['id']}").json() == card
    assert client.get("/v1/models/default").json() == card


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client) -> None:
    text = "Hello, wörld 🙂"
    given = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert given["count"] == len(given["tokens"]) == len(given["token_strs"])
    assert client.post("/detokenize", json={"tokens": given["tokens"]}).json() == {"prompt": text}


def test_conversation_is_tokenized_as_chat_counts_it(client: httpx.Client) -> None:
    count = client.post("/tokenize", json={"messages": HELLO}).json()["count"]
    assert answer(client, CHAT, messages=HELLO, max_tokens=1)["usage"]["prompt_tokens"] == count


def test_end_token_of_the_tokenizer_info_is_a_single_token(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    tokens = client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert tokens == [info["eos_token_id"]]


def test_probes_report_that_all_is_well(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    health = client.get("/health").json()
    assert health == {
        "status": "ok",
        "requests": 0,
        "restarts": 0,
        "device": "cpu",
        "devices": 1,
        "backend": "fake",
        "gpu": False,
    }
    assert client.get("/version").json()["version"]


def test_the_root_says_where_the_api_is_and_how_to_have_the_page(client: httpx.Client) -> None:
    told = client.get("/").json()
    assert "ostro serve --ui" in told["message"]
    assert (told["api"], told["models"], told["docs"]) == ("/v1", "/v1/models", "/docs")
    page = client.get("/", headers={"accept": "text/html,application/xhtml+xml"})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "ostro serve --ui" in page.text
    assert client.head("/").status_code == 200


def test_documentation_is_a_page(client: httpx.Client) -> None:
    response = client.get("/docs")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(docs/[^"]+)"', response.text)
    assert len(files) >= 3
    for file in files:
        assert client.get(f"/{file}").status_code == 200, file
        etag = client.get(f"/{file}").headers["etag"]
        assert client.get(f"/{file}", headers={"if-none-match": etag}).status_code == 304


@pytest.mark.parametrize("path", ["/docs/nothing.js", "/docs/../pages.py", "/docs/%2e%2e/pages.py", "/docs/"])
def test_documentation_has_no_other_files(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_redoc_leads_to_the_documentation(client: httpx.Client) -> None:
    response = client.get("/redoc", follow_redirects=True)
    assert (response.status_code, response.url.path) == (200, "/docs")


@pytest.mark.cases(2)
@pytest.mark.parametrize("path", ["/healthz", "/nowhere", "/v1/models", "/openapi.json"])
def test_every_answer_has_a_request_id(client: httpx.Client, path: str) -> None:
    assert client.get(path).headers["x-request-id"].startswith("req_")
    assert client.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert client.get(path, headers={"x-request-id": "no good"}).headers["x-request-id"].startswith("req_")


def test_body_with_nulls_everywhere_is_the_default_request(client: httpx.Client) -> None:
    names = [
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logit_bias",
        "user",
        "logprobs",
        "tools",
    ]
    body = json.dumps({"messages": HELLO, **dict.fromkeys(names), "max_completion_tokens": 2})
    response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text

"""Structured outputs over HTTP. The engine's tokens are drawn at random, so that nothing but the constraint makes the
output what it is.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from sse_events import streamed

from ostro import Client
from ostro.errors import BadRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
GBNF = 'root ::= item+\nitem ::= "x" | "y" [0-9]'
STRICT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"kind", "count"} and found["kind"] in ("a", "b") and 0 <= found["count"] <= 99


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: dict[str, tuple[dict[str, object], Callable[[str], bool]]] = {
    "response_format": ({"response_format": STRICT}, fits_schema),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "[ab]{3}c"}}, matches("[ab]{3}c")),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["red", "green"]}}, matches("red|green")),
    "no white space": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        lambda text: fits_schema(text) and not re.search(r"\s", text),
    ),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, fits_schema),
    "guided_regex": ({"guided_regex": "[0-9]{4}"}, matches("[0-9]{4}")),
    "guided_choice": ({"guided_choice": ["red", "green"]}, matches("red|green")),
    "guided_grammar": ({"guided_grammar": GBNF}, matches("(x|y[0-9])+")),
    "grammar": ({"grammar": 'start: ("x" | "y") "z"'}, matches("[xy]z")),
    "json_schema": ({"json_schema": SCHEMA}, fits_schema),
    "regex": ({"regex": "yes|no"}, matches("yes|no")),
    "ebnf": ({"ebnf": GBNF}, matches("(x|y[0-9])+")),
    "jump_forward": ({"json_schema": SCHEMA, "jump_forward": True}, fits_schema),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("structured")) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def answer(client: httpx.Client, path: str, body: dict[str, object]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", FORMS)
def test_every_spelling_is_kept_to_by_every_endpoint(client: httpx.Client, name: str) -> None:
    given, fits = FORMS[name]
    common = {**given, "max_tokens": 400, "seed": 3}
    chat = answer(client, CHAT, {"messages": [{"role": "user", "content": "Hi"}], "n": 2, **common})["choices"]
    texts = [choice["message"]["content"] for choice in chat]
    completions = answer(client, COMPLETIONS, {"prompt": ["a", "b"], **common})["choices"]
    texts += [choice["text"] for choice in completions]
    assert {choice["finish_reason"] for choice in [*chat, *completions]} == {"stop"}
    texts += answer(client, "/generate", {"prompts": ["a", "b"], **common})["completions"]
    assert len(texts) == 6
    assert all(map(fits, texts)), texts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_output_is_the_same(client: httpx.Client, path: str) -> None:
    prompt: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "a"}
    body = {**prompt, "response_format": STRICT, "temperature": 0, "max_tokens": 300}
    choice = answer(client, path, body)["choices"][0]
    parts = [chunk["choices"][0] for chunk in streamed(client, path, body)]
    if path == CHAT:
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
    else:
        assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"


def test_answer_that_is_cut_within_the_structure_ends_with_length(client: httpx.Client) -> None:
    body = {"prompt": "a", "response_format": STRICT, "max_tokens": 3}
    choice = answer(client, COMPLETIONS, body)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("{")


def test_json_object_is_one_if_it_ends(client: httpx.Client) -> None:
    body = {"prompt": "a", "response_format": {"type": "json_object"}, "max_tokens": 60, "n": 8, "seed": 1}
    for choice in answer(client, COMPLETIONS, body)["choices"]:
        assert choice["text"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_lenient_schema_ignores_what_cannot_be_enforced(client: httpx.Client) -> None:
    schema = {**SCHEMA, "not": {"required": ["other"]}}
    for format in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"structured_outputs": {"json": schema, "strict": False}},
    ):
        assert fits_schema(
            answer(client, COMPLETIONS, {"prompt": "a", "max_tokens": 200, **format})["choices"][0]["text"]
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (
            {"response_format": {**STRICT, "json_schema": {"name": "odd", "schema": {"not": {}}, "strict": True}}},
            "response_format",
            "Invalid schema for response_format 'odd': ",
        ),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "Invalid schema: "),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json", "uniqueItems"),
        ({"regex": "(["}, "regex", "Invalid regex: "),
        ({"grammar": "root ::= missing"}, "grammar", "Invalid grammar: "),
        ({"json_schema": {"type": "number", "multipleOf": 999_983}}, "json_schema", "multipleOf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_enforced_is_refused_before_anything_is_generated(
    client: httpx.Client, given: dict[str, object], param: str, words: str, stream: bool
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})):
        response = client.post(path, json={**prompt, **given, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]


def test_structural_tags_hold_between_their_tags_only(client: httpx.Client) -> None:
    body = {"prompt": "a", "response_format": {"type": "structural_tag", **TAG}, "max_tokens": 200, "seed": 5}
    for found in re.findall("<a>(.*?)</a>", answer(client, COMPLETIONS, body)["choices"][0]["text"]):
        assert fits_schema(found)


def test_our_own_client_takes_the_same_options(server: LiveServer) -> None:
    with Client(server.url) as client:
        chat = client.chat("Hi", response_format=STRICT, max_tokens=400).choices[0].message.content
        assert fits_schema(chat or "")
        with client.stream_chat("Hi", guided_choice=["red", "green"]) as stream:
            assert "".join(stream.text) in ("red", "green")
        assert client.complete("a", regex="[ab]{3}").choices[0].text.strip("ab") == ""
        [text] = client.generate("a", structured_outputs={"choice": ["red", "green"]}).completions
        assert text in ("red", "green")
        with pytest.raises(BadRequest) as refusal:
            client.generate("a", guided_json={"not": {}})
        assert refusal.value.param == "guided_json"

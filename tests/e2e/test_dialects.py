"""Responses and Messages by the default model: formats and calls are enforced there as in chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from dialect_calls import MESSAGES, RESPONSES, answered, output_text, refused
from live_server import live_server

Json = dict[str, Any]

SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "number": {"type": "integer", "minimum": 0}},
    "required": ["city", "number"],
    "additionalProperties": False,
}
UNENFORCEABLE: Json = {"type": "object", "properties": {"x": {"not": {}}}}
QUESTION = "Name a city and a number."


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with live_server(tmp_path_factory.mktemp("dialects"), faults="") as server, server.client() as client:
        yield client


def check(value: Json) -> None:
    assert value.keys() == {"city", "number"}
    assert isinstance(value["city"], str)
    assert isinstance(value["number"], int)


def in_messages(**fields: object) -> Json:
    asked = [{"role": "user", "content": QUESTION}]
    return {"model": "default", "messages": asked, "max_tokens": 120, "temperature": 0, **fields}


@pytest.mark.full
def test_formats_hold_in_both_dialects(client: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    response = answered(client, RESPONSES, input=QUESTION, max_output_tokens=120, temperature=0, text={"format": form})
    message = answered(
        client, MESSAGES, **in_messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    )
    check(json.loads(output_text(response)))
    assert message["content"] == [{"type": "text", "text": output_text(response)}]


@pytest.mark.full
def test_a_call_that_is_required_comes_and_fits_in_both_dialects(client: httpx.Client) -> None:
    tool = {"type": "function", "name": "note", "parameters": SCHEMA}
    response = answered(
        client,
        RESPONSES,
        input=QUESTION,
        max_output_tokens=120,
        temperature=0,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = response["output"]
    check(json.loads(call["arguments"]))
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = answered(
        client, MESSAGES, **in_messages(tools=[{"name": "note", "input_schema": SCHEMA}], tool_choice=choice)
    )
    [block] = message["content"]
    assert (block["name"], block["input"]) == ("note", json.loads(call["arguments"]))
    assert message["stop_reason"] == "tool_use"


def test_a_schema_that_cannot_be_enforced_is_named_as_the_dialect_names_it(client: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "place", "schema": UNENFORCEABLE, "strict": True}
    error = refused(client, RESPONSES, 400, input=QUESTION, text={"format": form})
    assert error["param"] == "text.format"
    config = {"format": {"type": "json_schema", "schema": UNENFORCEABLE}}
    error = refused(client, MESSAGES, 400, **in_messages(output_config=config))
    assert "output_config.format" in error["message"]

"""OpenAI's own Python package, unmodified, against scripted answers: `parse`, `stream`, tools, structured outputs."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from live_server import LiveServer
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
from scripted_answers import Scripts

SCRIPTS = Scripts()


class Weather(BaseModel):
    """How it is."""

    city: str
    sky: Literal["clear", "cloudy"]
    degrees: int


class GetWeather(BaseModel):
    city: str


OSLO = '{"city": "Oslo", "sky": "clear", "degrees": -3}'
CALL = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SAYS_JSON, CALLS, TALKS = SCRIPTS.add(OSLO), SCRIPTS.add(f"One moment.\n{CALL}"), SCRIPTS.add("Cold and clear.")
CALLS_TWICE = SCRIPTS.add(f"{CALL}\n{CALL.replace('Oslo', 'Rome')}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with SCRIPTS.served(tmp_path_factory.mktemp("sdk")) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(key: str) -> list[Any]:
    return [{"role": "user", "content": f"How is the weather? Case {key}."}]


@pytest.mark.full
def test_parse_gives_an_object_of_the_models_class(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=user(SAYS_JSON), response_format=Weather, temperature=0
    )
    assert answer.choices[0].message.parsed == Weather(city="Oslo", sky="clear", degrees=-3)
    assert answer.choices[0].finish_reason == "stop"


def test_stream_with_a_format_ends_with_the_parsed_object(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="default", messages=user(SAYS_JSON), response_format=Weather, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Weather(city="Oslo", sky="clear", degrees=-3)
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_answer_cut_within_the_structure_is_a_length_error_of_the_sdk(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="default", messages=user(SAYS_JSON), response_format=Weather, temperature=0, max_tokens=5
        )


def test_parse_gives_the_arguments_of_a_call_as_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=user(CALLS), tools=[pydantic_function_tool(GetWeather)], temperature=0
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Oslo")


def test_streamed_calls_are_merged_by_the_sdk_to_what_the_whole_answer_has(client: OpenAI) -> None:
    given: dict[str, Any] = {
        "model": "default",
        "messages": user(CALLS_TWICE),
        "tools": [pydantic_function_tool(GetWeather)],
        "temperature": 0,
    }
    with client.chat.completions.stream(**given) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**given).choices[0]
    assert [(each.index, each.name, each.arguments) for each in done] == [
        (0, "GetWeather", '{"city": "Oslo"}'),
        (1, "GetWeather", '{"city": "Rome"}'),
    ]
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    for one, other in zip(streamed.message.tool_calls, whole.message.tool_calls, strict=True):
        assert other.type == "function"
        assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"


def test_loop_of_call_and_result_comes_to_an_answer(client: OpenAI) -> None:
    messages = user(CALLS)
    tools: list[Any] = [pydantic_function_tool(GetWeather)]
    first = client.chat.completions.create(model="default", messages=messages, tools=tools, temperature=0)
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = json.dumps({"degrees": -3, "next": TALKS})
    messages = [
        *messages,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result},
    ]
    last = client.chat.completions.create(model="default", messages=messages, tools=tools, temperature=0)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Cold and clear.", "stop")


def test_schema_that_cannot_be_enforced_is_a_bad_request_in_openais_words(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    odd: Any = {"type": "json_schema", "json_schema": {"name": "odd", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=user(SAYS_JSON), response_format=odd)
    assert caught.value.param == "response_format"
    assert isinstance(caught.value.body, dict)
    assert str(caught.value.body["message"]).startswith("Invalid schema for response_format 'odd': ")

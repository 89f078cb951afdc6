"""The writer of Responses, checked by the OpenAI client's own types and accumulator."""

import json
from collections.abc import Iterable
from typing import Any, get_args

import httpx
import pytest
from answer_scripts import Replay, Script, scripts
from hypothesis import given
from openai import OpenAI
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.errors import ContextLengthExceeded, OstroError, QueueFull, RequestTimeout, SequenceFailed, Unavailable
from ostro.schemas.responses import CreateResponse, ResponseObject
from ostro.schemas.wire import parse
from ostro.server.dialects.responses.request import offered_tools, unsealed
from ostro.server.dialects.responses.writer import ResponseWriter
from ostro.server.dialects.writing import Counts, Outcome

Json = dict[str, Any]

DONE = Outcome(counts=Counts(prompt=11, cached=4, generated=7, reasoning=2))
CUT = Outcome(counts=Counts(prompt=11, generated=7), reason="length")
# The client's class of each type of event.
EVENTS: dict[str, type[BaseModel]] = {
    get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(get_args(ResponseStreamEvent)[0])
}
TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
    {"type": "web_search"},
]
REPLAY = Replay(httpx)
CLIENT = OpenAI(base_url="http://any/v1", api_key="any", http_client=REPLAY.client)
LOOK = CallBegin(0, "call_0", "look")


def writer(**fields: object) -> ResponseWriter:
    request = parse(CreateResponse, {"input": "Hello"} | fields)
    writer = ResponseWriter(request, model="m")
    writer.offer(offered_tools(request))
    return writer


def stream(each: ResponseWriter, events: Iterable[Event], outcome: Outcome = DONE) -> bytes:
    return each.begin() + b"".join(each.push([event]) for event in events) + each.finish(outcome)


def told(data: bytes) -> list[Json]:
    """The events; asserts their framing, their numbers, and that the client's types know them."""
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "response.failed":
            # The codes that agents act on are not among those that the type lists.
            EVENTS[event["type"]].model_validate(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def types(data: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told(data)]


def accumulated(data: bytes) -> SdkResponse:
    """What the client's own helper makes of the stream."""
    REPLAY.body = data
    with CLIENT.responses.stream(model="m", input="Hello") as events:
        for _ in events:
            pass
        return events.get_final_response()


@pytest.mark.full
@given(scripts())
def test_the_clients_accumulator_ends_with_the_response_that_the_last_event_tells(script: Script) -> None:
    each = writer(tools=TOOLS)
    data = stream(each, script.events)
    final = told(data)[-1]["response"]
    assert final == json.loads(json.dumps(each.response))
    ResponseObject.model_validate(final)
    read = accumulated(data)
    assert read.output_text == script.text
    assert [(item.type, item.id) for item in read.output] == [(item["type"], item["id"]) for item in final["output"]]
    calls = [item for item in final["output"] if item["type"] == "function_call"]
    assert [
        (f"{item['namespace']}.{item['name']}" if "namespace" in item else item["name"], item["arguments"])
        for item in calls
    ] == script.calls
    reasoned = [part["text"] for item in final["output"] if item["type"] == "reasoning" for part in item["content"]]
    assert "".join(reasoned) == script.reasoning


@given(scripts())
def test_the_response_is_the_same_however_its_events_are_pushed(script: Script) -> None:
    one, other = writer(tools=TOOLS), writer(tools=TOOLS)
    stream(one, script.events)
    other.begin()
    other.push(script.events)
    other.finish(DONE)

    def without_ids(output: object) -> list[Json]:
        assert isinstance(output, list)
        return [{name: value for name, value in item.items() if name != "id"} for item in output]

    assert without_ids(one.response["output"]) == without_ids(other.response["output"])


def test_text_follows_the_order_of_the_api() -> None:
    assert types(stream(writer(), [Text("Hel"), Text("lo")])) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_reasoning_a_message_and_calls_are_items_in_a_row() -> None:
    look_again = CallBegin(1, "call_1", "look")
    events: list[Event] = [Reasoning("Hm."), Text("I look."), LOOK, CallArguments(0, "{}"), look_again]
    data = stream(writer(), events)
    added = [event for event in told(data) if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["type"]) for event in added] == [
        (0, "reasoning"),
        (1, "message"),
        (2, "function_call"),
        (3, "function_call"),
    ]
    assert types(data)[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_a_call_without_arguments_is_still_added_and_done() -> None:
    data = stream(writer(), [LOOK])
    assert types(data)[2:] == [
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert accumulated(data).output[0].model_dump()["arguments"] == ""


def test_a_custom_tools_call_has_an_input() -> None:
    events: list[Event] = [
        CallBegin(0, "call_0", "shell", is_custom=True),
        CallArguments(0, "ls "),
        CallArguments(0, "-l"),
    ]
    each = writer()
    data = stream(each, events)
    assert types(data)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    [item] = told(data)[-1]["response"]["output"]
    assert (item["type"], item["call_id"], item["input"]) == ("custom_tool_call", "call_0", "ls -l")
    ResponseObject.model_validate(each.response)


def test_a_tool_of_a_namespace_is_called_by_its_two_names() -> None:
    data = stream(writer(tools=TOOLS), [CallBegin(0, "call_0", "files.read"), CallArguments(0, "{}")])
    [item] = told(data)[-1]["response"]["output"]
    assert (item["namespace"], item["name"]) == ("files", "read")


def test_hosted_tools_are_not_among_the_responses_tools() -> None:
    tools = writer(tools=TOOLS).response["tools"]
    assert isinstance(tools, list)
    assert [tool["type"] for tool in tools] == ["function", "namespace"]


def test_an_answer_that_was_cut_off_is_incomplete_with_what_had_come() -> None:
    data = stream(writer(), [Text("I look."), LOOK, CallArguments(0, '{"at": "ho')], CUT)
    last = told(data)[-1]
    assert last["type"] == "response.incomplete"
    response = last["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"at": "ho'


def test_an_answer_of_reasoning_alone_has_no_message() -> None:
    output = told(stream(writer(), [Reasoning("Hm.")], CUT))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning"]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    response = accumulated(stream(writer(), []))
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


def test_a_summary_that_was_asked_for_is_the_reasoning() -> None:
    data = stream(writer(reasoning={"summary": "auto"}), [Reasoning("First"), Reasoning(", second"), Text("Yes.")])
    assert types(data)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    item = told(data)[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "First, second"}]
    assert "content" not in item


def test_reasoning_is_sealed_if_the_request_includes_it() -> None:
    data = stream(writer(include=["reasoning.encrypted_content"]), [Reasoning("Hm."), Text("Yes.")])
    done = next(event for event in told(data) if event["type"] == "response.output_item.done")
    assert unsealed(done["item"]["encrypted_content"]) == "Hm."
    assert told(data)[-1]["response"]["output"][0] == done["item"]


def test_log_probabilities_go_with_the_text_and_not_with_calls() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    each = writer(include=["message.output_text.logprobs"])
    data = each.begin()
    data += each.push([Reasoning("h"), Text("x")], [[], [entry]]) + each.push([Text("a")], [[entry, entry]])
    data += each.push([LOOK, CallArguments(0, "{}")]) + each.finish(DONE)
    deltas = [event for event in told(data) if event["type"] == "response.output_text.delta"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 2]
    [part] = told(data)[-1]["response"]["output"][1]["content"]
    assert part["logprobs"] == [entry] * 3


def test_usage_reports_cached_and_reasoning_tokens() -> None:
    usage = accumulated(stream(writer(), [Text("Hi")])).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 2


def test_a_response_in_the_background_is_queued_first() -> None:
    each = writer(background=True)
    data = each.queue()
    assert each.response["status"] == "queued"
    data += stream(each, [Text("Hi")])
    assert types(data)[:3] == ["created", "queued", "in_progress"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SequenceFailed("It broke."), "server_error"),
        (RequestTimeout("Too long."), "server_error"),
        (QueueFull("Full."), "rate_limit_exceeded"),
        (Unavailable("Down."), "server_is_overloaded"),
        (ContextLengthExceeded(limit=1, prompt=2, output=0), "context_length_exceeded"),
    ],
)
def test_a_failure_is_the_last_event_and_has_a_code_that_clients_know(error: OstroError, code: str) -> None:
    each = writer()
    data = each.begin() + each.push([Text("Hal")]) + each.fail(error)
    last = told(data)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": error.public}
    assert last["response"]["output"][0]["status"] == "incomplete"
    ResponseObject.model_validate(each.response)


def test_a_cancelled_response_says_so() -> None:
    each = writer()
    data = each.begin() + each.push([Text("Hal")]) + each.cancel()
    assert told(data)[-1]["response"]["status"] == "cancelled"
    ResponseObject.model_validate(each.response)


def test_the_settings_are_those_of_the_request() -> None:
    asked: Json = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "tool_choice": {"type": "function", "name": "look"},
        "tools": TOOLS[:1],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "user": "me",
    }
    response = writer(**asked).response
    for name in ("instructions", "temperature", "max_output_tokens", "metadata", "tool_choice", "user"):
        assert response[name] == asked[name]
    text: Any = response["text"]
    assert text["format"]["schema"] == {"type": "object"}

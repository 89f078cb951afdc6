"""The writer of Anthropic's messages; checked by the Anthropic client's own types and accumulator where it is."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from answer_scripts import Replay, Script, scripts
from hypothesis import given

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.schemas.messages import AssistantMessage
from ostro.server.dialects.messages.writer import MessageWriter
from ostro.server.dialects.writing import Counts, Outcome

Json = dict[str, Any]

START = Counts(prompt=11, cached=4)
END = Counts(prompt=11, cached=4, generated=7)
DONE = Outcome(counts=END)
CUT = Outcome(counts=END, reason="length")
LOOK = CallBegin(0, "call_0", "look")


def stream(each: MessageWriter, events: Iterable[Event], outcome: Outcome = DONE) -> bytes:
    return each.begin(START) + b"".join(each.push([event]) for event in events) + each.finish(outcome)


def told(data: bytes) -> list[Json]:
    """The events; asserts their framing, and that blocks come one at a time and are numbered in order."""
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    current = -1
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            current, is_open = current + 1, True
        assert is_open
        assert event["index"] == current
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    return events


def written(events: Iterable[Event], outcome: Outcome = DONE) -> Json:
    each = MessageWriter(model="m")
    stream(each, events, outcome)
    return AssistantMessage.model_validate(each.message).model_dump()


@pytest.mark.full
@pytest.mark.examples
def test_the_clients_accumulator_ends_with_the_message() -> None:
    anthropic = pytest.importorskip("anthropic")
    replay = Replay(pytest.importorskip("httpx2"))
    client = anthropic.Anthropic(base_url="http://any", api_key="any", http_client=replay.client)

    @given(scripts())
    def check(script: Script) -> None:
        each = MessageWriter(model="m")
        replay.body = stream(each, script.events)
        with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]) as events:
            read = events.get_final_message().model_dump(mode="json", exclude_none=True)
        assert read["content"] == AssistantMessage.model_validate(each.message).model_dump()["content"]
        assert (read["stop_reason"], read["usage"]["output_tokens"]) == (each.message["stop_reason"], 7)

    check()


@given(scripts())
def test_blocks_add_up_to_what_the_model_did(script: Script) -> None:
    each = MessageWriter(model="m")
    events = told(stream(each, script.events))
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == script.reasoning
    assert "".join(delta.get("text", "") for delta in deltas) == script.text
    assert "".join(delta.get("partial_json", "") for delta in deltas) == "".join(call[1] for call in script.calls)
    content = AssistantMessage.model_validate(each.message).model_dump()["content"]
    uses = [(block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
    assert uses == [(name, json.loads(arguments)) for name, arguments in script.calls]


def test_thinking_is_signed_before_its_block_ends() -> None:
    events = told(stream(MessageWriter(model="m"), [Reasoning("Hm."), Text("Yes.")]))
    assert [event.get("delta", {}).get("type") or event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    signature = events[3]["delta"]["signature"]
    assert signature
    assert written([Reasoning("Hm.")])["content"] == [{"type": "thinking", "thinking": "Hm.", "signature": signature}]


def test_a_message_begins_without_blocks_and_with_the_prompts_tokens() -> None:
    start = told(stream(MessageWriter(model="m"), [Text("Hi")]))[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == 7
    assert start["usage"]["cache_read_input_tokens"] == 4


def test_input_and_cached_tokens_add_up_to_the_prompt() -> None:
    usage = written([Text("Hi")])["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 11
    assert usage["output_tokens"] == 7


@pytest.mark.parametrize(
    ("events", "outcome", "reason", "sequence"),
    [
        ([Text("Hi")], DONE, "end_turn", None),
        ([], DONE, "end_turn", None),
        ([Text("Hi")], Outcome(counts=END, stopped_by="###"), "stop_sequence", "###"),
        ([Text("Hi")], CUT, "max_tokens", None),
        ([Text("Hi")], Outcome(counts=END, reason="length", context_full=True), "model_context_window_exceeded", None),
        ([LOOK, CallArguments(0, "{}")], DONE, "tool_use", None),
        ([LOOK, CallArguments(0, '{"a')], CUT, "max_tokens", None),
        ([LOOK, CallArguments(0, "{}")], Outcome(counts=END, stopped_by="###"), "tool_use", None),
        ([LOOK, CallArguments(0, '{"a')], Outcome(counts=END, reason="length", stopped_by="b"), "stop_sequence", "b"),
    ],
)
def test_the_stop_reason_says_how_it_ended(
    events: list[Event], outcome: Outcome, reason: str, sequence: str | None
) -> None:
    message = written(events, outcome)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": "ho', {"a": 1, "b": "ho"}),
        ('{"a": 1, "b', {"a": 1}),
        ("{", {}),
    ],
)
def test_a_call_that_was_cut_off_keeps_the_arguments_that_had_come(arguments: str, given: Json) -> None:
    events: list[Event] = [LOOK, *([CallArguments(0, arguments)] if arguments else [])]
    assert written(events, CUT)["content"][0]["input"] == given


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    message = written([Text("a"), LOOK, CallArguments(0, "{}"), Text("b")])
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "text"]

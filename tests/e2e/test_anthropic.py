"""Anthropic's own Python client against /v1/messages: tools in a loop, streamed and not."""

from pathlib import Path

from client_process import PERSON, SUNNY, TEXT_AND_CALL, needs, seen_by
from live_server import LiveServer

pytestmark = needs("anthropic")

PROGRAM = """
import json, sys
from anthropic import Anthropic
from pydantic import BaseModel

url, call, sunny, person = sys.argv[1:]
client = Anthropic(base_url=url, api_key="any", max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "description": "The weather in a city.", "input_schema": schema}]
asked = [{"role": "user", "content": f"What is the weather? {call}"}]
given = dict(model="default", max_tokens=200, tools=tools)

whole = client.messages.create(messages=asked, **given)
with client.messages.stream(messages=asked, **given) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_message()

def blocks(message):
    return [block.text if block.type == "text" else [block.name, block.input] for block in message.content]

results = [
    {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": f"sunny {sunny}"}]}
    for block in streamed.content if block.type == "tool_use"
]
answered = [*asked, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": results}]
last = client.messages.create(messages=answered, **given)
counted = client.messages.count_tokens(model="default", messages=answered, tools=tools)
named = client.messages.create(
    messages=[{"role": "user", "content": "Rome?"}], tool_choice={"type": "tool", "name": "weather"}, **given
)

class Person(BaseModel):
    name: str
    age: int

parsed = client.messages.parse(
    model="default", max_tokens=60, messages=[{"role": "user", "content": f"Who? {person}"}], output_format=Person
)
print(json.dumps({
    "whole": blocks(whole),
    "streamed": blocks(streamed),
    "kinds": sorted(set(kinds)),
    "reasons": [whole.stop_reason, streamed.stop_reason, last.stop_reason],
    "last": blocks(last),
    "counted": counted.input_tokens,
    "used": last.usage.input_tokens + last.usage.cache_read_input_tokens,
    "named": [block.name for block in named.content],
    "parsed": parsed.parsed_output.model_dump(),
}))
"""


def test_anthropic_calls_tools_streams_counts_and_parses(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, TEXT_AND_CALL, SUNNY, PERSON)
    assert seen["whole"] == ["Let me look.", ["weather", {"city": "Oslo"}]]
    assert seen["streamed"] == seen["whole"]
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= set(seen["kinds"])
    assert seen["reasons"] == ["tool_use", "tool_use", "end_turn"]
    assert seen["last"] == ["It is sunny in Oslo."]
    assert seen["counted"] == seen["used"]
    assert seen["named"] == ["weather"]
    assert seen["parsed"] == {"name": "Ada", "age": 36}

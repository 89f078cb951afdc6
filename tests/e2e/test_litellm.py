"""litellm against `ostro serve`, as an OpenAI-compatible provider. In a process of its own: its imports warn."""

from typing import Any

import pytest
from client_process import CALLS, PERSON, SUNNY, needs, seen_by
from live_server import LiveServer

pytestmark = [pytest.mark.full, needs("litellm")]

# It takes five seconds to import: one process for all.
PROGRAM = """
import json, sys
import litellm
from pydantic import BaseModel

url, calls, sunny, person = sys.argv[1:]
given = dict(
    model="openai/default", api_base=f"{url}/v1", api_key="none", num_retries=0, max_tokens=12, temperature=0,
    messages=[{"role": "user", "content": "Say hello."}],
)
whole = litellm.completion(**given)
chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
rebuilt = litellm.stream_chunk_builder(chunks)
seen = {
    "whole": whole.choices[0].message.content,
    "streamed": text,
    "finish_reason": rebuilt.choices[0].finish_reason,
    "usage": rebuilt.usage.completion_tokens,
}
try:
    litellm.completion(**{**given, "messages": [{"role": "user", "content": "x " * 20000}]})
except litellm.ContextWindowExceededError as error:
    seen["error"] = error.status_code

class Person(BaseModel):
    name: str
    age: int

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
asked = [{"role": "user", "content": f"Weather? {calls}"}]
given = dict(model="openai/default", api_base=f"{url}/v1", api_key="none", num_retries=0)

whole = litellm.completion(**given, messages=asked, tools=tools)
streamed = litellm.stream_chunk_builder(list(litellm.completion(**given, messages=asked, tools=tools, stream=True)))
message = streamed.choices[0].message
results = [{"role": "tool", "tool_call_id": each.id, "content": f"sunny {sunny}"} for each in message.tool_calls]
last = litellm.completion(**given, messages=[*asked, message, *results], tools=tools)
formed = litellm.completion(**given, messages=[{"role": "user", "content": person}], response_format=Person)
response = litellm.responses(**given, input=f"Weather? {sunny}")
anthropic = litellm.completion(
    model="anthropic/default", api_base=url, api_key="none", max_tokens=200, messages=asked, tools=tools
)

def called(answer):
    calls = answer.choices[0].message.tool_calls
    return [[each.function.name, json.loads(each.function.arguments)] for each in calls]

seen |= {
    "called": [called(whole), called(streamed), called(anthropic)],
    "reasons": [answer.choices[0].finish_reason for answer in (whole, streamed, last, anthropic)],
    "last": last.choices[0].message.content,
    "formed": json.loads(formed.choices[0].message.content),
    "response": response.output[0].content[0].text,
}
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(scripted: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return seen_by(PROGRAM, scripted, tmp_path_factory.mktemp("litellm"), CALLS, SUNNY, PERSON)


def test_litellm_completes_streams_and_knows_a_context_error(seen: Any) -> None:
    assert seen["whole"]
    assert seen["whole"] == seen["streamed"]
    assert (seen["finish_reason"], seen["usage"], seen["error"]) == ("length", 12, 400)


def test_litellm_calls_tools_in_each_dialect(seen: Any) -> None:
    assert seen["called"] == [[["weather", {"city": "Oslo"}], ["weather", {"city": "Rome"}]]] * 3
    assert seen["reasons"] == ["tool_calls", "tool_calls", "stop", "tool_calls"]
    assert seen["last"] == seen["response"] == "It is sunny in Oslo."
    assert seen["formed"] == {"name": "Ada", "age": 36}

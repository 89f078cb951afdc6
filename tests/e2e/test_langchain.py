"""langchain-openai: structured output by both of its methods, and tools bound to a model, over chat and Responses."""

from pathlib import Path

import pytest
from client_process import PERSON, PERSON_CALL, SUNNY, TEXT_AND_CALL, needs, seen_by
from live_server import LiveServer

pytestmark = [pytest.mark.full, needs("langchain_openai")]

PROGRAM = """
import json, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, call, sunny, person, person_call = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

@tool
def weather(city: str) -> str:
    "The weather in a city."
    return f"sunny {sunny}"

def model(**given):
    return ChatOpenAI(model="default", base_url=f"{url}/v1", api_key="none", max_retries=0, temperature=0, **given)

def loop(llm):
    bound, messages = llm.bind_tools([weather]), [HumanMessage(f"Weather? {call}")]
    whole = bound.invoke(messages)
    gathered = None
    for chunk in bound.stream(messages):
        gathered = chunk if gathered is None else gathered + chunk
    messages.append(gathered)
    messages += [ToolMessage(weather.invoke(each).content, tool_call_id=each["id"]) for each in gathered.tool_calls]
    last = bound.invoke(messages)
    return {
        "calls": [[[each["name"], each["args"]] for each in message.tool_calls] for message in (whole, gathered)],
        "texts": [message.text for message in (whole, gathered, last)],
        "usage": gathered.usage_metadata["output_tokens"] > 0,
    }

asked = f"Who? {person}"
print(json.dumps({
    "schema": model().with_structured_output(Person).invoke(asked).model_dump(),
    "streamed": list(model().with_structured_output(Person).stream(asked))[-1].model_dump(),
    "call": model().with_structured_output(Person, method="function_calling").invoke(f"{person_call}").model_dump(),
    "json": model().with_structured_output(Person, method="json_mode").invoke(asked).model_dump(),
    "responses": model(use_responses_api=True).with_structured_output(Person).invoke(asked).model_dump(),
    "loops": [loop(model(stream_usage=True)), loop(model(use_responses_api=True))],
}))
"""


def test_langchain_parses_and_calls_tools(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, TEXT_AND_CALL, SUNNY, PERSON, PERSON_CALL)
    loops = seen.pop("loops")
    ways = "schema", "streamed", "call", "json", "responses"
    assert seen == {way: {"name": "Ada", "age": 36} for way in ways}
    for loop in loops:
        assert loop["calls"] == [[["weather", {"city": "Oslo"}]]] * 2
        assert loop["texts"] == ["Let me look.", "Let me look.", "It is sunny in Oslo."]
        assert loop["usage"]

"""llama-index with its client of OpenAI-like servers: tools, and a model of pydantic's as the answer."""

from pathlib import Path

from client_process import CALLS, PERSON, PERSON_CALL, needs, seen_by
from live_server import LiveServer

pytestmark = needs("llama_index", target="make test-clients")

PROGRAM = """
import json, sys
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, calls, person, person_call = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

def weather(city: str) -> str:
    "The weather in a city."
    return f"sunny in {city}"

given = dict(
    model="default", api_base=f"{url}/v1", api_key="none", is_chat_model=True, context_window=8192, max_tokens=300,
    max_retries=0, timeout=100,
)
caller = OpenAILike(is_function_calling_model=True, **given)
formatter = OpenAILike(is_function_calling_model=False, should_use_structured_outputs=True, **given)
tools = [FunctionTool.from_defaults(weather)]

def called(response):
    return [[each.tool_name, each.tool_kwargs] for each in caller.get_tool_calls_from_response(response)]

whole = caller.chat_with_tools(tools, user_msg=f"Weather? {calls}", allow_parallel_tool_calls=True)
*_, streamed = caller.stream_chat_with_tools(tools, user_msg=f"Weather? {calls}", allow_parallel_tool_calls=True)
ran = caller.predict_and_call(tools, user_msg=f"Weather? {calls}", allow_parallel_tool_calls=True)

def parsed(llm, key):
    return llm.as_structured_llm(Person).chat([ChatMessage(f"Who? {key}")]).raw.model_dump()

print(json.dumps({
    "called": [called(whole), called(streamed)],
    "ran": [each.content for each in ran.sources],
    "parsed": [parsed(caller, person_call), parsed(formatter, person)],
}))
"""


def test_llama_index_calls_tools_and_parses(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, CALLS, PERSON, PERSON_CALL)
    assert seen["called"] == [[["weather", {"city": "Oslo"}], ["weather", {"city": "Rome"}]]] * 2
    assert seen["ran"] == ["sunny in Oslo", "sunny in Rome"]
    assert seen["parsed"] == [{"name": "Ada", "age": 36}] * 2

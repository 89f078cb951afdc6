"""Haystack's generator of chats: tools in a loop, streamed and not, and a response in a format."""

from pathlib import Path

from client_process import CALLS, PERSON, SUNNY, needs, seen_by
from live_server import LiveServer

pytestmark = needs("haystack", target="make test-clients")

PROGRAM = """
import json, sys
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

url, calls, sunny, person = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

def weather(city: str) -> str:
    "The weather in a city."
    return f"sunny {sunny}"

def generator(**given):
    return OpenAIChatGenerator(
        model="default", api_base_url=f"{url}/v1", api_key=Secret.from_token("none"), max_retries=0, **given
    )

tool = create_tool_from_function(weather)
asked, pieces = [ChatMessage.from_user(f"Weather? {calls}")], []
llm = generator(tools=[tool])
[whole] = llm.run(asked)["replies"]
[streamed] = llm.run(asked, streaming_callback=pieces.append)["replies"]
results = [
    ChatMessage.from_tool(tool_result=tool.invoke(**each.arguments), origin=each) for each in streamed.tool_calls
]
[last] = llm.run([*asked, streamed, *results])["replies"]
[formed] = generator(generation_kwargs={"response_format": Person}).run([ChatMessage.from_user(person)])["replies"]
print(json.dumps({
    "calls": [[[each.tool_name, each.arguments] for each in message.tool_calls] for message in (whole, streamed)],
    "pieces": len(pieces),
    "last": last.text,
    "formed": json.loads(formed.text),
}))
"""


def test_haystack_calls_tools_and_gets_a_format(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, CALLS, SUNNY, PERSON)
    assert seen["calls"] == [[["weather", {"city": "Oslo"}], ["weather", {"city": "Rome"}]]] * 2
    assert seen["pieces"] > 2
    assert seen["last"] == "It is sunny in Oslo."
    assert seen["formed"] == {"name": "Ada", "age": 36}

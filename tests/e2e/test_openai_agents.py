"""OpenAI's agents library: a tool and a typed result, over both of its APIs, streamed and not."""

from pathlib import Path

import pytest
from client_process import CALLS, PERSON, SUNNY, needs, seen_by
from live_server import LiveServer

pytestmark = [pytest.mark.full, needs("agents")]

PROGRAM = """
import asyncio, json, sys
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel

url, calls, sunny, person = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

@function_tool
def weather(city: str) -> str:
    "The weather in a city."
    return f"sunny {sunny}"

@function_tool
def lookup(city: str) -> str:
    "Who lives there."
    return person

async def runs(kind):
    model = kind(model="default", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    agent = Agent(name="Forecaster", instructions="Be brief.", model=model, tools=[weather])
    streamed = Runner.run_streamed(agent, f"Weather? {calls}")
    kinds = [event.type async for event in streamed.stream_events()]
    typed = Agent(name="Typist", model=model, tools=[lookup], output_type=Person)
    return {
        "text": (await Runner.run(agent, f"Weather? {calls}")).final_output,
        "streamed": streamed.final_output,
        "items": [item.type for item in streamed.new_items],
        "kinds": sorted(set(kinds)),
        "typed": (await Runner.run(typed, f"Who? {person}")).final_output.model_dump(),
    }

async def main():
    print(json.dumps([await runs(kind) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)]))

asyncio.run(main())
"""


def test_openai_agents_runs_over_chat_and_responses(scripted: LiveServer, tmp_path: Path) -> None:
    for seen in seen_by(PROGRAM, scripted, tmp_path, CALLS, SUNNY, PERSON):
        assert seen["text"] == seen["streamed"] == "It is sunny in Oslo."
        assert seen["items"] == ["tool_call_item"] * 2 + ["tool_call_output_item"] * 2 + ["message_output_item"]
        assert "raw_response_event" in seen["kinds"]
        assert seen["typed"] == {"name": "Ada", "age": 36}

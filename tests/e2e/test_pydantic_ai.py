"""pydantic-ai: an agent with a tool and a typed result, over chat and Responses, by each of its ways to a result."""

from pathlib import Path

import pytest
from client_process import CALLS, PERSON, RESULT_CALL, SUNNY, needs, seen_by
from live_server import LiveServer

pytestmark = [pytest.mark.full, needs("pydantic_ai")]

PROGRAM = """
import asyncio, json, sys
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, calls, sunny, person, result_call = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

async def runs(kind):
    model = kind("default", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    plain, forced = Agent(model), Agent(model, output_type=Person)
    cities = []

    @plain.tool_plain
    def weather(city: str) -> str:
        "The weather in a city."
        cities.append(city)
        return f"sunny {sunny}"

    @forced.tool_plain(name="weather")
    def known(city: str) -> str:
        "The weather in a city."
        return f"sunny {result_call}"

    async with plain.run_stream(f"Weather? {calls}") as stream:
        streamed = await stream.get_output()
    return {
        "text": (await plain.run(f"Weather? {calls}")).output,
        "streamed": streamed,
        "cities": sorted(cities),
        "forced": (await forced.run(f"Weather? {calls}")).output.model_dump(),
        "native": (await Agent(model, output_type=NativeOutput(Person)).run(f"Who? {person}")).output.model_dump(),
    }

async def main():
    print(json.dumps([await runs(kind) for kind in (OpenAIChatModel, OpenAIResponsesModel)]))

asyncio.run(main())
"""


def test_pydantic_ai_runs_agents_with_tools_and_results(scripted: LiveServer, tmp_path: Path) -> None:
    for seen in seen_by(PROGRAM, scripted, tmp_path, CALLS, SUNNY, PERSON, RESULT_CALL):
        assert seen["text"] == seen["streamed"] == "It is sunny in Oslo."
        assert seen["cities"] == ["Oslo", "Oslo", "Rome", "Rome"]
        assert seen["forced"] == seen["native"] == {"name": "Ada", "age": 36}

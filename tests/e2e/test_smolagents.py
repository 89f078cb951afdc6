"""smolagents: an agent that calls tools, which it demands at every step, and one that writes code."""

from pathlib import Path

import pytest
from client_process import ANSWER_CALL, CALLS, CODE, needs, seen_by
from live_server import LiveServer

pytestmark = [pytest.mark.full, needs("smolagents")]

PROGRAM = """
import json, sys
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool

url, calls, answer_call, code = sys.argv[1:]
cities = []

@tool
def weather(city: str) -> str:
    '''The weather in a city.

    Args:
        city: The city's name.
    '''
    cities.append(city)
    return f"sunny {answer_call}"

model = OpenAIServerModel(model_id="default", api_base=f"{url}/v1", api_key="none", max_tokens=300)
given = dict(model=model, tools=[weather], max_steps=3, verbosity_level=LogLevel.OFF)
answers = [ToolCallingAgent(**given, stream_outputs=streams).run(f"Weather? {calls}") for streams in (False, True)]
written = CodeAgent(**given).run(f"Weather? {code}")
# What it streamed has no end of line.
print("\\n" + json.dumps({"answers": answers, "cities": sorted(cities), "written": written}))
"""


def test_smolagents_calls_tools_and_writes_code(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, CALLS, ANSWER_CALL, CODE)
    assert seen["answers"] == ["sunny", "sunny"]
    assert seen["cities"] == ["Bonn", "Oslo", "Oslo", "Rome", "Rome"]
    assert seen["written"] == "fine"

"""Outlines with its OpenAI backend: a type as the output, whole and streamed."""

from pathlib import Path

from client_process import PERSON, needs, seen_by
from live_server import LiveServer

pytestmark = needs("outlines", target="make test-clients")

PROGRAM = """
import json, sys
import openai, outlines
from pydantic import BaseModel

url, person = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

model = outlines.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), "default")
print(json.dumps({
    "whole": json.loads(model(f"Who? {person}", Person)),
    "streamed": json.loads("".join(model.stream(f"Who? {person}", Person))),
    "free": model(f"Who? {person}"),
}))
"""


def test_outlines_gets_its_type(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, PERSON)
    assert seen["whole"] == seen["streamed"] == {"name": "Ada", "age": 36}
    assert seen["free"] == '{"name": "Ada", "age": 36}'

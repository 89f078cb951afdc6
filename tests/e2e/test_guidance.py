"""guidance with its OpenAI backend: JSON by a schema.

In an environment of its own: it pins another llguidance than the server has.
"""

from pathlib import Path

import pytest
from checkout import ROOT
from client_process import PERSON, seen_by
from live_server import LiveServer

PYTHON = ROOT / "build" / "guidance" / "bin" / "python"

PROGRAM = """
import json, sys
import guidance
from guidance import assistant, user
from guidance.models import OpenAI
from pydantic import BaseModel

url, person = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

model = OpenAI("default", base_url=f"{url}/v1", api_key="none", echo=False)
with user():
    model += f"Who? {person}"
with assistant():
    model += guidance.json(name="person", schema=Person)
print(json.dumps({"person": json.loads(model["person"])}))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="guidance not installed: make test-clients")
def test_guidance_generates_json_by_a_schema(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, PERSON, python=str(PYTHON))
    assert seen == {"person": {"name": "Ada", "age": 36}}

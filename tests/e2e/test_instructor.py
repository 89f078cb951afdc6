"""instructor: its mode of tools, which names one, and its mode of schemas; whole and in parts."""

from pathlib import Path

import pytest
from client_process import PARTIAL_CALL, PERSON, PERSON_CALL, needs, seen_by
from live_server import LiveServer

pytestmark = [pytest.mark.full, needs("instructor")]

PROGRAM = """
import json, sys
import instructor
from openai import OpenAI
from pydantic import BaseModel

url, person, person_call, partial_call = sys.argv[1:]

class Person(BaseModel):
    name: str
    age: int

def client(mode):
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)

def asked(key):
    messages = [{"role": "user", "content": f"Who? {key}"}]
    return dict(model="default", response_model=Person, max_retries=0, messages=messages)

tools, schema = client(instructor.Mode.TOOLS), client(instructor.Mode.JSON_SCHEMA)
print(json.dumps({
    "tools": tools.create(**asked(person_call)).model_dump(),
    "schema": schema.create(**asked(person)).model_dump(),
    "json": client(instructor.Mode.JSON).create(**asked(person)).model_dump(),
    "partial tools": list(tools.create_partial(**asked(partial_call)))[-1].model_dump(),
    "partial schema": list(schema.create_partial(**asked(person)))[-1].model_dump(),
}))
"""


def test_instructor_gets_its_model_in_each_mode(scripted: LiveServer, tmp_path: Path) -> None:
    seen = seen_by(PROGRAM, scripted, tmp_path, PERSON, PERSON_CALL, PARTIAL_CALL)
    modes = "tools", "schema", "json", "partial tools", "partial schema"
    assert seen == {mode: {"name": "Ada", "age": 36} for mode in modes}

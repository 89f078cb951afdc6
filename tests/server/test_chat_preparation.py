"""What a chat request comes to before an engine sees it: what its output is held to, and what that is made from."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_answers import default_tokenizer

from ostro.answers.tools import Tool, ToolChoice
from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest
from ostro.frontend.requests import Frontend
from ostro.sampling_params import SamplingParams
from ostro.server.dialects.chat_preparation import ChatPreparation
from ostro.server.dialects.chat_request import ChatRequest
from ostro.structured import StructuredOutput

REQUIRED = ToolChoice(mode="required")
# In formats that write arguments one by one, each has a grammar of its own, where this leads nowhere.
SIBLING: dict[str, Any] = {"properties": {"x": {"type": "integer"}, "y": {"$ref": "#/properties/x"}}}


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    made = Frontend("model", default_tokenizer(), tool_format="pythonic")
    yield made
    made.close()


def prepared(frontend: Frontend, *tools: Tool, **asked: Any) -> Constraint:
    async def prepare() -> Constraint | None:
        preparation = ChatPreparation(frontend, constrains=True, max_characters=1 << 20)
        plan, _, reading = await preparation.prompt(chat)
        return await preparation.constraint(chat, plan, reading)

    params = SamplingParams(structured=asked.pop("structured", None))
    chat = ChatRequest(messages=[{"role": "user", "content": "Hello."}], params=params, tools=tools, **asked)
    constraint = asyncio.run(prepare())
    assert constraint is not None
    return constraint


@pytest.mark.full
def test_tools_that_are_too_much_together_are_held_to_their_names(frontend: Frontend) -> None:
    whole = Tool(name="f", parameters=SIBLING)
    strict = Tool(name="g", strict=True, parameters={"properties": {"z": {"const": "zz"}}})
    constraint = prepared(frontend, whole, strict, tool_choice=REQUIRED)
    assert "#/properties/x" not in constraint.grammar
    assert "zz" in constraint.grammar, "what is strict stays"
    with pytest.raises(BadRequest) as refusal:
        prepared(frontend, Tool(name="f", strict=True, parameters=SIBLING), tool_choice=REQUIRED)
    assert refusal.value.param == "tools"


def test_structure_beside_tools_is_written_as_it_is_alone(frontend: Frontend) -> None:
    for options in ({}, {"whitespace_pattern": ""}, {"whitespace_pattern": "_?"}, {"jump_forward": True}):
        structured = StructuredOutput(json_schema='{"enum": ["zz"], "uniqueItems": false}', **options)
        alone = frontend.checker.check(structured).grammar
        schema = alone.removeprefix('{"grammars": [{"json_schema": ').removesuffix("}]}")
        constraint = prepared(frontend, Tool(name="f"), structured=structured)
        assert f"%json {schema}\n" in constraint.grammar


def test_users_regex_has_the_limits_of_one_wherever_it_stands(frontend: Frontend) -> None:
    custom = Tool(name="c", is_custom=True, regex="a{3}")
    assert prepared(frontend, custom, tool_choice=REQUIRED).is_users
    assert prepared(frontend, Tool(name="f"), structured=StructuredOutput(regex="a{3}")).is_users
    assert not prepared(frontend, Tool(name="f"), tool_choice=REQUIRED).is_users

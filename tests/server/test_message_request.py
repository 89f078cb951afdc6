"""Requests to /v1/messages: what is refused, and what becomes of the rest."""

from typing import Any

import pytest

from ostro.answers.tools import ReasoningSettings, ToolChoice
from ostro.errors import BadRequest, Unsupported
from ostro.schemas.messages import CountMessageTokens, CreateMessage
from ostro.schemas.wire import parse
from ostro.server.dialects.messages import request as message_request
from ostro.server.dialects.messages.request import continues_answer, conversation
from ostro.structured import StructuredOutput
from ostro.text.chat import Message

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "Hello"}
LOOK: Json = {"name": "look", "input_schema": {"type": "object"}}
USE: Json = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ä"}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "t1", "content": "A house."}


def request(**fields: object) -> CreateMessage:
    return parse(CreateMessage, {"model": "m", "max_tokens": 9, "messages": [USER]} | fields)


def messages(*given: Json, system: object = None) -> list[Message]:
    return conversation(request(messages=list(given), system=system))


def say(role: str, content: object) -> Json:
    return {"role": role, "content": content}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def test_system_blocks_are_one_message_without_the_header_that_changes() -> None:
    header = text("x-anthropic-billing-header: cc_version=2.1.197.abc; cch=1;")
    assert messages(USER, system=[header, text("Be kind."), text("Be brief.") | {"cache_control": {"type": "e"}}]) == [
        say("system", "Be kind.\nBe brief."),
        USER,
    ]
    assert messages(USER, system=[header]) == [USER]
    assert messages(USER, system="Be kind.")[0] == say("system", "Be kind.")


def test_messages_of_one_role_in_a_row_are_one() -> None:
    assert messages(USER, say("user", [text("a"), text("b")])) == [say("user", "Hello\n\na\nb")]


def test_thinking_text_and_calls_are_one_turn_and_results_come_before_the_users_text() -> None:
    found = messages(
        USER,
        say("assistant", [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("I look."), USE]),
        say("user", [RESULT, text("Well?")]),
    )
    called = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ä"}'}}
    assert found == [
        USER,
        say("assistant", "I look.") | {"reasoning_content": "Hm.", "tool_calls": [called]},
        say("tool", "A house.") | {"tool_call_id": "t1"},
        say("user", "Well?"),
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, "A house."),
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({"is_error": True}, "Error: A house."),
        ({"is_error": True, "content": []}, "Error: "),
    ],
)
def test_results_come_as_text_as_blocks_and_as_errors(fields: Json, content: str) -> None:
    assert messages(say("assistant", [USE]), say("user", [RESULT | fields]))[-1]["content"] == content


def test_redacted_thinking_is_left_out() -> None:
    found = messages(USER, say("assistant", [{"type": "redacted_thinking", "data": "x"}, text("Yes.")]))
    assert found[-1] == say("assistant", "Yes.")


def test_a_result_without_its_call_is_refused() -> None:
    with pytest.raises(BadRequest) as refused:
        messages(USER, say("user", [text("a"), RESULT]))
    assert refused.value.param == "messages[1].content[1].tool_use_id"


def test_a_last_assistant_message_is_continued_unless_it_calls() -> None:
    assert continues_answer(request(messages=[USER, say("assistant", "The answer is")]))
    assert not continues_answer(request(messages=[USER, say("assistant", [text("I look."), USE])]))
    assert not continues_answer(request(messages=[USER]))


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(mode="required"), False),
        ({"type": "tool", "name": "look"}, ToolChoice(mode="named", name="look"), True),
        ({"type": "none"}, ToolChoice(mode="none"), True),
    ],
)
def test_tool_choices_are_those_of_chat(given: object, choice: ToolChoice, parallel: bool) -> None:
    taken = request(tools=[LOOK], tool_choice=given)
    assert message_request.tool_choice(taken) == choice
    assert message_request.calls_in_parallel(taken) == parallel


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, ReasoningSettings()),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ReasoningSettings(enabled=True, budget=1024)),
        ({"thinking": {"type": "disabled"}}, ReasoningSettings(enabled=False)),
        (
            {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"}},
            ReasoningSettings(effort="high"),
        ),
        ({"thinking": {"type": "between_tools"}}, ReasoningSettings()),
    ],
)
def test_thinking_is_reasoning(fields: Json, settings: ReasoningSettings) -> None:
    assert message_request.reasoning_settings(request(**fields)) == settings


def test_an_output_format_is_a_structured_output() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    found = request(output_config=form).sampling_params().structured
    assert found == StructuredOutput.from_schema({"type": "object"})
    assert request().sampling_params().structured is None


def test_requests_from_claude_code_are_accepted() -> None:
    taken = request(
        max_tokens=32_000,
        stream=True,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "x"},
        tools=[LOOK | {"description": "Looks.", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        messages=[say("user", [text("Hi") | {"cache_control": {"type": "ephemeral"}}]), say("system", "Agents: none.")],
    )
    assert [tool.name for tool in message_request.offered_tools(taken)] == ["look"]
    assert [message["role"] for message in conversation(taken)] == ["user", "system"]


def test_tokens_are_counted_without_a_limit() -> None:
    parse(CountMessageTokens, {"model": "m", "messages": [USER], "tools": [LOOK], "thinking": {"type": "adaptive"}})
    with pytest.raises(BadRequest):
        parse(CountMessageTokens, {"model": "m", "messages": [USER], "max_tokens": 9})


@pytest.mark.parametrize(
    ("fields", "param", "is_unsupported"),
    [
        ({"max_tokens": None}, "max_tokens", False),
        ({"max_tokens": 0}, "max_tokens", False),
        ({"messages": []}, "messages", False),
        ({"messages": [say("user", [{"type": "image", "source": {}}])]}, "messages[0].content[0].type", True),
        ({"messages": [say("user", [{"type": "telepathy"}])]}, "messages[0].content[0].type", False),
        ({"messages": [say("user", [USE])]}, "messages[0].content[0]", False),
        ({"messages": [say("assistant", [RESULT])]}, "messages[0].content[0]", False),
        ({"messages": [say("tool", "x")]}, "messages[0].role", False),
        ({"messages": [say("assistant", [USE | {"input": "x"}])]}, "messages[0].content[0].input", False),
        ({"system": [{"type": "image"}]}, "system[0].type", True),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", True),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", True),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema", False),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", False),
        ({"tool_choice": "auto"}, "tool_choice", False),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens", False),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", False),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "regex": "a"}, "output_config", False),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", True),
        ({"container": "c"}, "container", True),
        ({"n": 2}, "n", True),
        ({"stop": ["x"]}, "stop", True),
        ({"colour": 1}, "colour", False),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Json, param: str, is_unsupported: bool) -> None:
    with pytest.raises(BadRequest) as refused:
        request(**fields)
    assert refused.value.param == param
    assert isinstance(refused.value, Unsupported) == is_unsupported


def test_sampling_parameters_are_those_of_chat() -> None:
    params = request(temperature=0.5, top_k=3, seed=7, stop_sequences=["x", "y"]).sampling_params()
    assert (params.temperature, params.top_k, params.seed, params.stop) == (0.5, 3, 7, ("x", "y"))
    assert params.max_tokens == 9

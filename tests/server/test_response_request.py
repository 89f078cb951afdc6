"""Requests to /v1/responses: what is refused, and what becomes of the rest."""

from typing import Any

import pytest

from ostro.answers.tools import ToolChoice
from ostro.errors import BadRequest, Unsupported
from ostro.schemas.responses import CreateResponse
from ostro.schemas.wire import parse
from ostro.server.dialects.responses import request as response_request
from ostro.server.dialects.responses.request import conversation, offered_tools, sealed, unsealed
from ostro.structured import StructuredOutput
from ostro.text.chat import Message

Json = dict[str, Any]

LOOK: Json = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL: Json = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT: Json = {"type": "function_call_output", "call_id": "c1", "output": "A house."}


def request(**fields: object) -> CreateResponse:
    return parse(CreateResponse, {"input": "Hello"} | fields)


def messages(*items: Json, instructions: str | None = None) -> list[Message]:
    return conversation(instructions, request(input=list(items)).input)


def say(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def test_a_text_is_a_users_message() -> None:
    assert conversation(None, request(input="Hello").input) == [say("user", "Hello")]


def test_instructions_and_developer_messages_are_one_system_message() -> None:
    found = messages(say("developer", "Use tools."), say("system", "Be kind."), say("user", "Hi"), instructions="Be.")
    assert found == [say("system", "Be.\n\nUse tools.\n\nBe kind."), say("user", "Hi")]


def test_a_developer_message_in_the_middle_stays_there() -> None:
    found = messages(say("user", "Hi"), say("assistant", "Yes?"), say("developer", "Be brief."), say("user", "Why?"))
    assert [message["role"] for message in found] == ["user", "assistant", "system", "user"]


def test_a_users_messages_in_a_row_stay_apart_as_in_chat() -> None:
    assert messages(say("user", "Here:"), say("user", "Hi")) == [say("user", "Here:"), say("user", "Hi")]


def test_parts_are_joined_whatever_their_type_is_called() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert messages({"role": "assistant", "content": parts}) == [say("assistant", "a\nb\nc")]


def test_reasoning_a_message_and_calls_are_one_turn_and_outputs_follow_it() -> None:
    found = messages(
        say("user", "Where?"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": "I look."},
        CALL,
        CALL | {"call_id": "c2"},
        OUTPUT,
        OUTPUT
        | {"call_id": "c2", "output": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Aha."}]},
        say("assistant", "There."),
    )
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert found == [
        say("user", "Where?"),
        say("assistant", "I look.") | {"reasoning_content": "Hm.", "tool_calls": [called, called | {"id": "c2"}]},
        say("tool", "A house.") | {"tool_call_id": "c1"},
        say("tool", "A\nB") | {"tool_call_id": "c2"},
        say("assistant", "There.") | {"reasoning_content": "Aha."},
    ]


def test_a_custom_tools_call_and_output_are_kept() -> None:
    found = messages(
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a b"},
    )
    assert found == [
        say("assistant", "")
        | {"tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}]},
        say("tool", "a b") | {"tool_call_id": "c1"},
    ]


def test_sealed_reasoning_is_read_again_and_anothers_is_left_out() -> None:
    assert unsealed(sealed("Hm, ë.")) == "Hm, ë."
    ours = {"type": "reasoning", "summary": [], "encrypted_content": sealed("Hm.")}
    assert messages(ours, CALL)[0]["reasoning_content"] == "Hm."
    for foreign in ("gAAAAB", "ostro1.§", "ostro1.////"):
        assert "reasoning_content" not in messages(ours | {"encrypted_content": foreign}, CALL)[0]


def test_an_output_without_its_call_is_refused() -> None:
    with pytest.raises(BadRequest) as refused:
        messages(say("user", "Hi"), OUTPUT)
    assert refused.value.param == "input[1].call_id"


def test_tools_of_a_namespace_are_offered_under_both_names_and_hosted_ones_are_left_out() -> None:
    space = {
        "type": "namespace",
        "name": "files",
        "description": "Files.",
        "tools": [LOOK, {"type": "custom", "name": "x"}],
    }
    offered = offered_tools(request(tools=[LOOK, {"type": "web_search", "filters": {"a": 1}}, space]))
    assert [tool.name for tool in offered.tools] == ["look", "files.look", "files.x"]
    assert offered.namespaces == {"files.look": ("files", "look"), "files.x": ("files", "x")}
    assert offered.left_out == ("web_search",)
    called = messages(CALL | {"namespace": "files"})[0]["tool_calls"]
    assert isinstance(called, list)
    assert called[0]["function"]["name"] == "files.look"


def test_hosted_tools_of_kinds_that_are_not_known_yet_are_left_out_too() -> None:
    offered = offered_tools(request(tools=[LOOK, {"type": "web_search_2031", "depth": 9}]))
    assert [tool.name for tool in offered.tools] == ["look"]
    assert offered.left_out == ("web_search_2031",)
    for field in ("parameters", "format"):
        with pytest.raises(BadRequest) as refused:
            request(tools=[{"type": "functon", "name": "f", field: {}}])
        assert refused.value.param == "tools[0].type"


def test_a_choice_that_requires_one_of_hosted_tools_is_refused() -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "web_search"}, {"type": "web_search_2031"}]}
    assert response_request.tool_choice(request(tool_choice=allowed)).allowed == frozenset()
    with pytest.raises(BadRequest) as refused:
        response_request.tool_choice(request(tool_choice=allowed | {"mode": "required"}))
    assert refused.value.param == "tool_choice"


def test_errors_about_tools_name_them_as_the_request_does() -> None:
    space = {"type": "namespace", "name": "files", "tools": [LOOK, {"type": "custom", "name": "x"}]}
    offered = offered_tools(request(tools=[{"type": "web_search"}, LOOK, space]))
    assert offered.named("tools[0].function.parameters") == "tools[1].parameters"
    assert offered.named("tools[1].function.parameters") == "tools[2].tools[0].parameters"
    assert offered.named("tools[2].custom.format") == "tools[2].tools[1].format"
    assert offered.named("tools") == "tools"
    assert offered.named(None) is None


def test_a_tool_is_strict_only_where_it_says_so() -> None:
    tools = offered_tools(request(tools=[LOOK, LOOK | {"strict": True}, LOOK | {"strict": False}])).tools
    assert [tool.strict for tool in tools] == [False, True, False]


def test_custom_tools_keep_their_formats() -> None:
    def custom(form: Json) -> Json:
        return {"type": "custom", "name": "x", "format": form}

    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tools = offered_tools(request(tools=[custom({"type": "text"}), custom(regex), custom(lark)])).tools
    assert [(tool.is_custom, tool.regex, tool.grammar) for tool in tools] == [
        (True, None, None),
        (True, "a+", None),
        (True, None, "start: /a/"),
    ]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("none", ToolChoice(mode="none")),
        ("auto", ToolChoice()),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "name": "look"}, ToolChoice(mode="named", name="look")),
        ({"type": "custom", "name": "x", "namespace": "files"}, ToolChoice(mode="named", name="files.x")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}, {"type": "mcp"}],
            },
            ToolChoice(mode="required", allowed=frozenset({"look"})),
        ),
    ],
)
def test_tool_choices_are_those_of_chat(given: object, choice: ToolChoice) -> None:
    assert response_request.tool_choice(request(tool_choice=given)) == choice


def test_formats_are_structured_outputs() -> None:
    def structured(form: Json) -> StructuredOutput | None:
        return request(text={"format": form}).sampling_params().structured

    schema = {"type": "object", "properties": {"ä": {"type": "string"}}}
    named = {"type": "json_schema", "name": "x", "schema": schema}
    found = structured(named | {"strict": True})
    assert found is not None
    assert found == StructuredOutput.from_schema(schema)
    assert structured(named) == StructuredOutput.from_schema(schema, strict=False)
    assert structured({"type": "json_object"}) == StructuredOutput(json_object=True)
    assert structured({"type": "text"}) is None


def test_requests_from_codex_are_accepted() -> None:
    taken = request(
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=True,
        tool_choice="auto",
        reasoning={"summary": "auto"},
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        tools=[LOOK | {"strict": False}, {"type": "web_search", "external_web_access": False}],
        input=[
            {"type": "message", "id": "own", "role": "developer", "content": [{"type": "input_text", "text": "Be."}]}
        ],
    )
    assert taken.include == ["reasoning.encrypted_content"]


def test_include_of_hosted_tools_has_no_effect() -> None:
    assert request(include=["web_search_call.action.sources", "file_search_call.results"]).include == []


@pytest.mark.parametrize(
    ("fields", "param", "is_unsupported"),
    [
        ({"input": [{"type": "mcp_call"}]}, "input[0].type", True),
        ({"input": [say("user", "a"), {"type": "telepathy"}]}, "input[1].type", False),
        ({"input": [{"id": "a", "status": "completed"}]}, "input[0].type", False),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", True),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "input[0].content[0].text", False),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", False),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments", False),
        ({"input": [CALL | {"colour": 1}]}, "input[0].colour", False),
        ({"input": []}, "input", False),
        ({"input": [7]}, "input[0]", False),
        ({"tools": [{"type": "telepathy", "parameters": {}}]}, "tools[0].type", False),
        ({"tools": [LOOK | {"parameters": "x"}]}, "tools[0].parameters", False),
        ({"tool_choice": "maybe"}, "tool_choice.type", False),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", True),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", False),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", False),
        ({"text": {"verbosity": "low"}}, "text.verbosity", True),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a+"}, "text", False),
        ({"include": ["everything"]}, "include[0]", False),
        ({"include": [[]]}, "include[0]", False),
        ({"tool_choice": {"type": []}}, "tool_choice.type", False),
        ({"input": [{"type": {}}]}, "input[0].type", False),
        ({"conversation": "conv_1"}, "conversation", True),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", True),
        ({"n": 2}, "n", True),
        ({"max_output_tokens": 0}, "max_output_tokens", False),
        ({"background": True, "store": False}, "background", False),
        ({"metadata": {"a": 1}}, "metadata.a", False),
        ({"colour": 1}, "colour", False),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", False),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "colour": 1}}},
            "text.format.colour",
            False,
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Json, param: str, is_unsupported: bool) -> None:
    with pytest.raises(BadRequest) as refused:
        request(**fields)
    assert refused.value.param == param
    assert isinstance(refused.value, Unsupported) == is_unsupported


def test_sampling_parameters_are_those_of_chat() -> None:
    params = request(
        temperature=0.5, seed=7, top_k=3, max_output_tokens=9, stop=["x"], top_logprobs=2
    ).sampling_params()
    assert (params.temperature, params.seed, params.top_k, params.max_tokens) == (0.5, 7, 3, 9)
    assert (params.stop, params.logprobs) == (("x",), 2)

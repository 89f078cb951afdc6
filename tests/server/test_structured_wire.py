"""What the output must look like, and which tools there are, as requests spell it."""

import json
from typing import Any

import pytest

from ostro.errors import BadRequest, Unsupported
from ostro.sampling_params import SamplingParams
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.native import GenerateRequest
from ostro.schemas.structured import StructuredFields
from ostro.schemas.wire import parse
from ostro.server.dialects.chat.request import chat_request
from ostro.structured import StructuredOutput

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"naïve": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
GBNF = 'root ::= "yes" | "no"'
TAG: dict[str, Any] = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
ENDPOINTS: list[tuple[type[Any], dict[str, object]]] = [
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    (CompletionRequest, {"prompt": "Hi"}),
    (GenerateRequest, {"prompts": ["Hi"]}),
]
STRICT = {"name": "n", "schema": SCHEMA, "strict": True}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def chat(**fields: object) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}], **fields})


def refused(**fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat(**fields).sampling_params()
    return caught.value


# --- what the output must look like ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("schema", "given"), ENDPOINTS, ids=["chat", "completions", "generate"])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            StructuredOutput(json_schema=TEXT, strict=False),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutput(json_schema=TEXT, strict=False),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutput(json_schema=TEXT),
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, StructuredOutput(structural_tag=json.dumps(TAG))),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=TEXT)),
        ({"structured_outputs": {"json": TEXT, "strict": False}}, StructuredOutput(json_schema=TEXT, strict=False)),
        (
            {"structured_outputs": {"json": TEXT, "whitespace_pattern": " "}},
            StructuredOutput(json_schema=TEXT, whitespace_pattern=" "),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutput(json_object=True, whitespace_pattern="(?:)"),
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, StructuredOutput(regex="[ab]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": GBNF}}, StructuredOutput(grammar=GBNF)),
        ({"structured_outputs": {"structural_tag": TAG}}, StructuredOutput(structural_tag=json.dumps(TAG))),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=TEXT)),
        ({"guided_regex": "a"}, StructuredOutput(regex="a")),
        ({"guided_choice": ["a"]}, StructuredOutput(choice=("a",))),
        ({"guided_grammar": GBNF}, StructuredOutput(grammar=GBNF)),
        ({"grammar": GBNF}, StructuredOutput(grammar=GBNF)),
        ({"json_schema": SCHEMA}, StructuredOutput(json_schema=TEXT)),
        ({"json_schema": TEXT}, StructuredOutput(json_schema=TEXT)),
        ({"regex": "a"}, StructuredOutput(regex="a")),
        ({"ebnf": GBNF}, StructuredOutput(grammar=GBNF)),
        ({"regex": "a", "jump_forward": True}, StructuredOutput(regex="a", jump_forward=True)),
        ({"regex": "a", "response_format": {"type": "text"}}, StructuredOutput(regex="a")),
        ({"response_format": None, "structured_outputs": None}, None),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else json.dumps(value)[:60],
)
def test_every_spelling_means_one_structured_output(
    schema: type[Any], given: dict[str, object], asked: dict[str, object], expected: StructuredOutput | None
) -> None:
    assert parse(schema, given | asked).sampling_params().structured == expected


_PLAIN_VALUES: dict[str, object] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": GBNF,
    "grammar": GBNF,
    "json_schema": SCHEMA,
    "regex": "a",
    "ebnf": GBNF,
}


def test_two_spellings_at_once_contradict_each_other_by_name() -> None:
    names = [name for name in StructuredFields.model_fields if name != "jump_forward"]
    assert names == list(_PLAIN_VALUES)
    for first in names:
        for second in names[names.index(first) + 1 :]:
            error = refused(**{first: _PLAIN_VALUES[first], second: _PLAIN_VALUES[second]})
            assert (error.param, first in error.message) == (second, True)


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "pattern",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}},
            "response_format.json_schema.schema",
            "an object",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "leave it out"),
        ({"structured_outputs": {}}, "structured_outputs.json", "is required"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "contradicts json"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
            "contradicts",
        ),
        ({"structured_outputs": {"regex": "a", "strict": False}}, "structured_outputs.regex", "Invalid regex: strict"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "Invalid schema: json_schema is not JSON"),
        ({"guided_json": "[]"}, "guided_json", "Invalid schema: json_schema must be an object"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": [""]}, "guided_choice", "Invalid choice: choice must hold non-empty strings"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "structured output"),
        ({"grammar": 3}, "grammar", "string"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_errors_name_the_field_as_the_request_spells_it(asked: dict[str, object], param: str, words: str) -> None:
    error = refused(**asked)
    assert (error.param, words in error.message) == (param, True), error.message


def test_error_of_a_named_schema_reads_like_openais() -> None:
    source = chat(
        response_format={"type": "json_schema", "json_schema": {"name": "weather", "schema": {}}}
    ).format_source
    assert source is not None
    with pytest.raises(Unsupported) as caught, source.named_in_errors():
        raise Unsupported("#/properties/x: not is not supported.", param="json_schema")
    assert caught.value.message.startswith("Invalid schema for response_format 'weather': #/properties/x")
    assert caught.value.param == "response_format"
    with pytest.raises(BadRequest, match="Other") as other, source.named_in_errors():
        raise BadRequest("Other.", param="messages")
    assert other.value.param == "messages"


# --- tools ----------------------------------------------------------------------------------------------------------


def tools_of(**fields: object) -> Any:
    return chat_request(chat(**fields), SamplingParams())


def test_functions_and_custom_tools_keep_what_they_say() -> None:
    custom = {
        "name": "g",
        "description": "d",
        "format": {"type": "grammar", "grammar": {"definition": "a", "syntax": "regex"}},
    }
    made = tools_of(tools=[FUNCTION, {"type": "custom", "custom": custom}], parallel_tool_calls=False)
    function, other = made.tools
    assert (function.name, function.parameters, function.strict, function.is_custom) == ("f", SCHEMA, False, False)
    assert (other.name, other.description, other.regex, other.grammar, other.is_custom) == ("g", "d", "a", None, True)
    assert made.parallel_tool_calls is False


@pytest.mark.parametrize(
    ("given", "mode", "name", "allowed"),
    [
        ("none", "none", None, None),
        ("auto", "auto", None, None),
        ("required", "required", None, None),
        ({"type": "function", "function": {"name": "f"}}, "named", "f", None),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            "required",
            None,
            {"f"},
        ),
    ],
)
def test_tool_choice_is_a_mode_a_name_or_some_names(
    given: object, mode: str, name: str | None, allowed: object
) -> None:
    choice = tools_of(tools=[FUNCTION], tool_choice=given).tool_choice
    assert (choice.mode, choice.name, choice.allowed) == (mode, name, allowed)


@pytest.mark.parametrize("asks_for_nothing", [{"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []}])
def test_no_op_values_are_accepted(asks_for_nothing: dict[str, object]) -> None:
    assert tools_of(**asks_for_nothing).tools == ()
    assert tools_of(reasoning_effort="none", parallel_tool_calls=False, function_call="auto").reasoning.effort == "none"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{}], "tool_choice": "no"}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].function.name"),
        ({"tools": [FUNCTION], "tool_choice": "no"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_token_budget": 1, "reasoning_budget": 2}, "reasoning_budget"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_errors_name_the_field_and_tools_before_the_choice(asked: dict[str, object], param: str) -> None:
    assert refused(**asked).param == param


@pytest.mark.parametrize(("given", "words"), [({"x1": 1}, "'x1'"), ({"7": "no"}, "'7'"), ({"7": 500}, "key 7")])
def test_error_about_a_logit_bias_names_the_key(given: dict[str, object], words: str) -> None:
    error = refused(logit_bias=given)
    assert (error.param, words in error.message) == ("logit_bias", True), error.message


def test_calls_in_a_history_reach_the_template_as_functions() -> None:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "index": 0},
        {"id": "2", "type": "custom", "custom": {"name": "g", "input": 'say "hi"'}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    cached = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    [first, user] = parse(ChatCompletionRequest, {"messages": [message, cached]}).template_messages()
    assert first["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": json.dumps({"input": 'say "hi"'})}},
    ]
    assert user["content"] == [{"type": "text", "text": "Hi"}]

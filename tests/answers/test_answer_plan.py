"""What is rendered, enforced and read for a request, by what its template knows."""

import json
from dataclasses import replace
from typing import Any

import pytest
from test_call_grammar import Grammar, Vocabulary

from ostro.answers.events import CallBegin, Reasoning, Text
from ostro.answers.formats import FORMATS
from ostro.answers.plan import AnswerPlan, OutputRules, plan_answer
from ostro.answers.profile import ReasoningMarkers, TemplateProfile
from ostro.answers.tools import ANY_OBJECT, ReasoningSettings, Tool, ToolChoice
from ostro.errors import BadRequest
from ostro.structured import StructuredOutput

NONE = TemplateProfile()
QWEN = TemplateProfile(
    tools_in_prompt=True,
    argument_form="mapping",
    results=True,
    several_calls=True,
    null_content=True,
    tool_format="hermes",
    reasoning=ReasoningMarkers("<think>", "</think>"),
    thinking_variable="enable_thinking",
)
MISTRAL = replace(
    QWEN,
    short_ids=True,
    tool_format="mistral",
    alternates=True,
    late_system=False,
    reasoning=None,
    thinking_variable=None,
    special_ids={"[TOOL_CALLS]": 5, "[ARGS]": 6},
)
LLAMA = replace(QWEN, several_calls=False, null_content=False, tool_format="llama3_json", reasoning=None)
HARMONY = replace(
    QWEN,
    tool_format="harmony",
    reasoning=None,
    thinking_variable=None,
    takes_effort=True,
    special_ids=Vocabulary(FORMATS["harmony"].special).specials,
)

F = Tool(
    name="f",
    description="It finds.",
    parameters={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
)
G = Tool(name="g")
HELLO = {"role": "user", "content": "Hello."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "é": ["ü"]}'}}
OTHER = {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
JSON = StructuredOutput(json_object=True)


def plan(*messages: Any, profile: TemplateProfile = NONE, **asked: Any) -> AnswerPlan:
    return plan_answer(messages or [HELLO], profile, **asked)


def checked(made: AnswerPlan, prompt: str = "…", **schemas: Any) -> OutputRules:
    """With the tools' schemas as they are, but for these, and the structure JSON if there is one."""
    reading = made.reading(prompt)
    left = {check.name: json.loads(check.structured.json_schema or "") for check in made.checks}
    return reading.enforcing(left | schemas, '%json {"type": "object"}')


def contents(made: AnswerPlan) -> list[tuple[object, object]]:
    return [(message["role"], message["content"]) for message in made.messages]


# What is rendered


def test_conversation_without_tools_is_left_as_it_is() -> None:
    made = plan({"role": "system", "content": "Be brief."}, HELLO, template_kwargs={"a": 1})
    assert contents(made) == [("system", "Be brief."), ("user", "Hello.")]
    assert (made.tools, made.template_kwargs, made.checks) == (None, {"a": 1}, ())
    assert made.reading("…").is_plain


def test_template_that_takes_tools_gets_them() -> None:
    made = plan(profile=QWEN, tools=[F, G])
    assert contents(made) == [("user", "Hello.")]
    assert made.tools == [
        {"type": "function", "function": {"name": "f", "description": "It finds.", "parameters": F.parameters}},
        {
            "type": "function",
            "function": {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]


def test_template_without_tools_has_them_in_the_system_message() -> None:
    [system, user] = contents(plan(tools=[F]))
    assert system[0] == "system"
    assert '{"name": "f", "description": "It finds.", "parameters": {"type": "object"' in str(system[1])
    assert '<tool_call>\n{"name": "name", "arguments": {"argument": "value"}}\n</tool_call>' in str(system[1])
    assert user == ("user", "Hello.")
    [system, _] = contents(plan({"role": "system", "content": "Be brief."}, HELLO, tools=[F]))
    assert str(system[1]).startswith("Be brief.\n\nYou can call")
    assert plan(tools=[F]).tools is None


def test_tools_stay_in_the_prompt_if_none_may_be_called() -> None:
    made = plan(profile=QWEN, tools=[F], choice=ToolChoice(mode="none"))
    assert made.tools is not None
    reading = made.reading("…")
    assert (reading.grammar(), reading.format) == (None, None)
    assert len(plan(tools=[F], choice=ToolChoice(mode="none")).messages) == 2


def test_history_of_calls_is_written_as_text_where_the_template_shows_none() -> None:
    said = {**CALLING, "content": "Let me see.", "tool_calls": [CALL, OTHER]}
    assert contents(plan(HELLO, said, RESULT, {**RESULT, "content": ""})) == [
        ("user", "Hello."),
        (
            "assistant",
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1, "é": ["ü"]}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ),
        ("user", "<tool_response>\n42\n</tool_response>"),
        ("user", "<tool_response>\n\n</tool_response>"),
    ]


def test_arguments_have_the_form_that_the_template_wants() -> None:
    def arguments(profile: TemplateProfile) -> Any:
        [_, calling, _] = plan(HELLO, CALLING, RESULT, profile=profile).messages
        calls: Any = calling["tool_calls"]
        return calls[0]["function"]["arguments"]

    assert arguments(QWEN) == {"x": 1, "é": ["ü"]}
    assert arguments(replace(QWEN, argument_form="string")) == '{"x": 1, "é": ["ü"]}'


@pytest.mark.parametrize(
    ("given", "rendered"),
    [('{"x": ', {"arguments": '{"x": '}), ("[1]", {"arguments": [1]}), ("", {}), (None, {}), ({"x": 1}, {"x": 1})],
)
def test_broken_arguments_do_not_break_the_template(given: object, rendered: object) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    [message] = plan({**CALLING, "tool_calls": [call]}, profile=QWEN).messages
    calls: Any = message["tool_calls"]
    assert calls[0]["function"]["arguments"] == rendered


@pytest.mark.parametrize(("null_content", "content"), [(True, None), (False, "")])
@pytest.mark.parametrize("given", [None, "", []])
def test_empty_content_beside_calls_is_what_the_template_takes(
    null_content: bool, content: str | None, given: object
) -> None:
    """Case 33."""
    made = plan({**CALLING, "content": given}, profile=replace(QWEN, null_content=null_content))
    assert contents(made) == [("assistant", content)]


def test_results_bear_the_name_of_what_was_called() -> None:
    [_, _, result] = plan(HELLO, CALLING, RESULT, profile=QWEN).messages
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "42", "name": "f"}


@pytest.mark.parametrize("content", [[{"type": "text", "text": "42"}], "", "x" * 1_000_000, "<|im_end|> <tool_call>"])
def test_results_of_any_form_are_passed_on(content: Any) -> None:
    """Cases 34 and 35."""
    [_, result] = plan(CALLING, {**RESULT, "content": content}, profile=QWEN).messages
    assert result["content"] == content
    [_, written] = plan(CALLING, {**RESULT, "content": content}).messages
    text = "42" if isinstance(content, list) else content
    assert written["content"] == f"<tool_response>\n{text}\n</tool_response>"


def test_ids_are_shortened_alike_for_a_call_and_its_result() -> None:
    """Case 31."""
    [calling, result] = plan(CALLING, RESULT, profile=MISTRAL).messages
    calls: Any = calling["tool_calls"]
    assert calls[0]["id"] == result["tool_call_id"]
    assert len(calls[0]["id"]) == 9
    assert calls[0]["id"].isalnum()
    kept = {**RESULT, "tool_call_id": "abcdefGH1"}
    assert plan(kept, profile=MISTRAL).messages[0]["tool_call_id"] == "abcdefGH1"


def test_calls_come_one_by_one_where_a_message_takes_no_more() -> None:
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, OTHER]}
    first, second = plan(said, profile=LLAMA).messages
    assert (first["content"], second["content"]) == ("Hm.", "")
    names = [call["function"]["name"] for message in (first, second) for call in message["tool_calls"]]  # type: ignore[attr-defined]
    assert names == ["f", "g"]


def test_custom_tools_are_functions_of_one_text() -> None:
    tool = Tool(name="patch", description="Patches.", is_custom=True, grammar='start: "a"')
    call = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": 'say "a"'}}
    made = plan({**CALLING, "tool_calls": [call]}, profile=QWEN, tools=[tool])
    assert made.tools is not None
    function: Any = made.tools[0]["function"]
    assert function["description"] == 'Patches.\n\nThe input must match this Lark grammar:\nstart: "a"'
    assert function["parameters"]["required"] == ["input"]
    calls: Any = made.messages[0]["tool_calls"]
    assert calls[0]["function"] == {"name": "patch", "arguments": {"input": 'say "a"'}}


def test_system_messages_are_users_where_the_template_takes_none() -> None:
    late = {"role": "system", "content": "Now be brief."}
    assert contents(plan({"role": "system", "content": "A"}, HELLO, late, HELLO, profile=MISTRAL)) == [
        ("system", "A"),
        ("user", "Hello.\n\nNow be brief.\n\nHello."),
    ]
    gemma = replace(NONE, system=False, late_system=False, alternates=True)
    [user] = contents(plan(tools=[F], profile=gemma))
    assert user[0] == "user"
    assert str(user[1]).endswith("\n\nHello.")


def test_call_without_a_name_is_refused() -> None:
    with pytest.raises(BadRequest, match="tool_calls needs a function with a name"):
        plan({**CALLING, "tool_calls": [{"id": "a", "type": "function"}]})


# Choices


@pytest.mark.parametrize("choice", [ToolChoice(mode="required"), ToolChoice(mode="named", name="f")])
def test_choice_of_a_call_needs_tools(choice: ToolChoice) -> None:
    with pytest.raises(BadRequest, match="there are no tools") as raised:
        plan(choice=choice)
    assert raised.value.param == "tool_choice"


@pytest.mark.parametrize(
    "choice", [ToolChoice(mode="named", name="h"), ToolChoice(mode="auto", allowed=frozenset({"f", "h"}))]
)
def test_choice_of_an_unknown_tool_is_refused(choice: ToolChoice) -> None:
    with pytest.raises(BadRequest, match="'h', which is not in tools") as raised:
        plan(tools=[F, G], choice=choice)
    assert raised.value.param == "tool_choice"


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(BadRequest, match="two entries named 'f'") as raised:
        plan(tools=[F, F])
    assert raised.value.param == "tools"


def test_automatic_choice_without_tools_asks_for_nothing() -> None:
    assert plan(choice=ToolChoice()).reading("…").is_plain


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Enforced(Grammar):
    """The grammar of a plan."""

    def __init__(self, made: AnswerPlan, prompt: str = "…", reading: OutputRules | None = None) -> None:
        special = tuple(made.profile.special_ids)[1:]
        super().__init__("hermes", mode="lazy", specials=special)
        reading = reading or checked(made, prompt)
        self.grammar = reading.grammar() or ""
        self.lazy = reading.lazy


def test_automatic_choice_leaves_text_free_and_holds_calls_to_their_schemas() -> None:
    enforced = Enforced(plan(tools=[F, G]))
    assert enforced.lazy
    assert enforced.accepts("Just text.")
    assert enforced.accepts("Hi " + hermes('{"x": 1}') + "\n" + hermes("{}", "g") + " bye")
    assert not enforced.accepts(hermes('{"x": "a"}'))
    assert not Enforced(plan(tools=[F], parallel=False)).accepts(hermes('{"x": 1}') + hermes('{"x": 1}'))


def test_required_choice_makes_at_least_one_call() -> None:
    """Case 20."""
    enforced = Enforced(plan(tools=[F, G], choice=ToolChoice(mode="required")))
    assert not enforced.lazy
    assert not enforced.accepts("")
    assert not enforced.accepts("Hi")
    assert enforced.accepts(hermes('{"x": 1}') + "\n" + hermes("{}", "g"))


def test_named_choice_makes_exactly_one_call_of_that_tool() -> None:
    """Case 21."""
    enforced = Enforced(plan(tools=[F, G], choice=ToolChoice(mode="named", name="f")))
    assert enforced.read(hermes('{"x": 1}')).is_over
    assert not enforced.accepts(hermes("{}", "g"))


def test_allowed_tools_narrow_what_is_called_and_not_the_prompt() -> None:
    choice = ToolChoice(mode="required", allowed=frozenset({"g"}))
    made = plan(profile=QWEN, tools=[F, G], choice=choice)
    assert made.tools is not None
    assert len(made.tools) == 2
    enforced = Enforced(made, "</think>")
    assert enforced.accepts(hermes("{}", "g"))
    assert not enforced.accepts(hermes('{"x": 1}'))


def test_answer_has_its_format_or_is_a_call() -> None:
    enforced = Enforced(plan(tools=[F], structured=JSON))
    assert not enforced.lazy
    assert enforced.accepts('{"a": 1}')
    assert enforced.accepts(hermes('{"x": 1}'))
    assert not enforced.accepts("Hi")
    assert plan(structured=JSON).reading("…").grammar() is None, "left to whoever compiles structured outputs"
    forced = Enforced(plan(tools=[F], structured=JSON, choice=ToolChoice(mode="required")))
    assert not forced.accepts('{"a": 1}')


def test_schemas_are_to_be_checked_one_by_one() -> None:
    """Case 39."""
    strict = replace(F, name="s", strict=True)
    custom = Tool(name="c", is_custom=True, regex="a+")
    made = plan(tools=[G, F, strict, replace(F, name="loose", enforced=ANY_OBJECT), custom])
    checks = [(check.tool_index, check.name, check.is_strict) for check in made.checks]
    assert checks == [(1, "f", False), (2, "s", True), (4, "c", True)]
    structured = made.checks[1].structured
    assert json.loads(structured.json_schema or "")["additionalProperties"] is False
    assert structured.strict
    assert plan(tools=[F], choice=ToolChoice(mode="none")).checks == ()


def test_calls_are_held_to_what_the_checks_left() -> None:
    made = plan(tools=[F, G])
    relaxed = {"type": "object", "properties": {"x": {"type": "string"}}}
    enforced = Enforced(made, reading=checked(made, f=relaxed))
    assert enforced.accepts(hermes('{"x": "a"}'))
    assert not enforced.accepts(hermes('{"x": 1}'))
    enforced = Enforced(made, reading=made.reading("…").enforcing({}, None))
    assert enforced.accepts(hermes('{"x": [1]}')), "nothing was left"
    assert not enforced.accepts(hermes('{"x": 1}', "g"))


def test_schema_that_is_too_large_is_not_enforced_or_refused_by_the_tools_name() -> None:
    large = replace(F, parameters={"properties": {"x": {"description": "x" * 300_000}}})
    made = plan(tools=[G, large])
    assert made.checks == ()
    assert len(checked(made).grammar() or "") < 10_000
    with pytest.raises(BadRequest, match="at most 262144 characters") as refusal:
        plan(tools=[G, replace(large, strict=True)])
    assert refusal.value.param == "tools[1].function.parameters"


def test_grammar_that_is_too_large_can_do_without_schemas_that_are_not_strict() -> None:
    strict = replace(F, name="s", strict=True)
    made = plan(tools=[F, G, strict])
    reading = checked(made)
    loosened = reading.loosened()
    assert loosened is not None
    assert loosened.loosened() is None, "there is nothing more to leave out"
    assert checked(plan(tools=[G, strict])).loosened() is None
    assert plan().reading("…").loosened() is None
    enforced = Enforced(made, reading=loosened)
    assert enforced.accepts(hermes('{"y": []}', "f"))
    assert not enforced.accepts(hermes('{"y": []}', "s"))
    assert not enforced.accepts(hermes('{"y": []}', "g"))


@pytest.mark.parametrize(
    ("asked", "is_users"),
    [
        ({"tools": [F]}, False),
        ({"tools": [Tool(name="c", is_custom=True)]}, False),
        ({"tools": [Tool(name="c", is_custom=True, regex="a+")]}, True),
        ({"tools": [F], "structured": StructuredOutput(regex="a+")}, True),
        ({"tools": [F], "structured": JSON}, False),
    ],
)
def test_grammar_with_a_users_regex_is_a_users(asked: dict[str, Any], is_users: bool) -> None:
    assert plan(**asked).reading("…").is_users == is_users


@pytest.mark.parametrize("structured", [StructuredOutput(grammar='start: "a"'), StructuredOutput(structural_tag="{}")])
@pytest.mark.parametrize("asked", [{"tools": [F]}, {"profile": HARMONY}])
def test_grammar_cannot_be_part_of_an_answer(structured: StructuredOutput, asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="cannot be combined with tools") as raised:
        plan(structured=structured, **asked)
    assert raised.value.param == structured.kind
    plan(structured=structured, tools=[F], choice=ToolChoice(mode="required"))


# Reading


def test_first_state_is_read_off_the_prompts_end() -> None:
    made = plan(profile=QWEN)
    for tail, raw, reasoning, text in (
        ("assistant\n", "<think>\nR</think>\n\nC", "R", "C"),
        ("assistant\n<think>\n", "R</think>C", "R", "C"),
        ("assistant\n<think>\n\n</think>\n\n", "C", "", "C"),
    ):
        reader = made.reading(tail).reader()
        reader.push(raw)
        reader.end(cut=False)
        assert (reader.reasoning, reader.text) == (reasoning, text)


def test_continued_message_may_have_opened_the_reasoning() -> None:
    for content, is_open in (("<think>\nSo", True), ("<think>a</think>b", False), ("b", False)):
        made = plan(HELLO, {"role": "assistant", "content": content}, profile=QWEN, continue_final_message=True)
        assert made.reading(f"…{content}").in_reasoning == is_open


def test_constraint_begins_after_the_reasoning() -> None:
    for asked in ({"structured": JSON}, {"tools": [F], "choice": ToolChoice(mode="required")}):
        open_already = plan(profile=QWEN, **asked).reading("…<think>\n")
        assert (open_already.free_until, open_already.prompt_suffix) == ("</think>", "")
        opened = plan(profile=QWEN, **asked).reading("…")
        assert (opened.free_until, opened.prompt_suffix, opened.in_reasoning) == ("</think>", "<think>\n", True)
        if opened.grammar() is not None:
            assert Enforced(plan(profile=QWEN, **asked)).accepts("\n\n" + hermes('{"x": 1}'))
        closed = plan(profile=QWEN, **asked).reading("…<think>\n\n</think>\n\n")
        assert (closed.free_until, closed.prompt_suffix, closed.in_reasoning) == ("", "", False)


@pytest.mark.parametrize(
    ("thinks_unasked", "asked", "thinks"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"reasoning": ReasoningSettings(enabled=True)}, True),
        (False, {"reasoning": ReasoningSettings(effort="high")}, True),
        (False, {"reasoning": ReasoningSettings(budget=9)}, True),
        (True, {"reasoning": ReasoningSettings(enabled=False)}, False),
        (True, {"reasoning": ReasoningSettings(effort="none")}, False),
        (True, {"template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_reasoning_is_begun_for_the_model_only_where_it_is_on(
    thinks_unasked: bool, asked: dict[str, Any], thinks: bool
) -> None:
    """Granite's template only tells the model, in the system message: the structure was written into a thought."""
    profile = replace(QWEN, thinks_unasked=thinks_unasked)
    for wanted in ({"structured": JSON}, {"tools": [F], "choice": ToolChoice(mode="required")}):
        reading = plan(profile=profile, **wanted, **asked).reading("…<|im_start|>assistant\n")
        assert (reading.prompt_suffix, reading.free_until) == (("<think>\n", "</think>") if thinks else ("", ""))


def test_a_channel_is_begun_with_its_name() -> None:
    channel = ReasoningMarkers("<|channel>", "<channel|>", label="thought")
    profile = TemplateProfile(reasoning=channel, thinking_variable="enable_thinking", thinks_unasked=False)
    made = plan(profile=profile, structured=JSON, reasoning=ReasoningSettings(enabled=True))
    assert made.reading("…<|turn>model\n").prompt_suffix == "<|channel>thought\n"
    assert made.reading("…<|channel>thought\n").in_reasoning
    assert not made.reading("…<|channel>thought\n<channel|>").in_reasoning


def test_automatic_calls_leave_the_model_to_begin_its_reasoning() -> None:
    made = plan(profile=QWEN, tools=[F])
    assert made.reading("…").prompt_suffix == ""
    enforced = Enforced(made)
    assert enforced.accepts("<think>\nA <tool_call> helps.</think>\n\n" + hermes('{"x": 1}'))
    assert {*enforced.read("<think>\nA <tool_call> he").free} == {"1"}


def test_budget_ends_the_reasoning() -> None:
    reading = plan(profile=QWEN, reasoning=ReasoningSettings(budget=100)).reading("…")
    assert (reading.free_tokens, reading.free_until, reading.lazy) == (100, "</think>", True)
    assert reading.grammar() is not None
    made = plan(profile=QWEN, reasoning=ReasoningSettings(budget=0))
    assert made.template_kwargs == {"enable_thinking": False}
    assert made.reading("…<think>\n\n</think>\n\n").free_tokens is None
    assert plan(reasoning=ReasoningSettings(budget=100)).reading("…").is_plain


@pytest.mark.parametrize(
    ("reasoning", "kwargs"),
    [
        (ReasoningSettings(), {}),
        (ReasoningSettings(enabled=False), {"enable_thinking": False}),
        (ReasoningSettings(effort="none"), {"enable_thinking": False}),
        (ReasoningSettings(effort="high"), {"enable_thinking": True}),
        (ReasoningSettings(effort="high", enabled=False), {"enable_thinking": False}),
        (ReasoningSettings(budget=5), {"enable_thinking": True}),
        (ReasoningSettings(budget=5, effort="none"), {"enable_thinking": False}),
        (ReasoningSettings(budget=0, effort="high"), {"enable_thinking": False}),
        (ReasoningSettings(budget=5, enabled=False), {"enable_thinking": False}),
    ],
)
def test_reasoning_is_switched_by_the_templates_own_variable(
    reasoning: ReasoningSettings, kwargs: dict[str, object]
) -> None:
    assert plan(profile=QWEN, reasoning=reasoning).template_kwargs == kwargs
    assert plan(reasoning=reasoning).template_kwargs == {}


def test_template_variables_of_the_request_win() -> None:
    made = plan(profile=QWEN, reasoning=ReasoningSettings(enabled=True), template_kwargs={"enable_thinking": False})
    assert made.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(("effort", "told"), [("high", "high"), ("minimal", "low"), ("max", "high")])
def test_effort_is_passed_to_templates_that_read_it(effort: str, told: str) -> None:
    made = plan(profile=HARMONY, reasoning=ReasoningSettings(effort=effort))
    assert made.template_kwargs == {"reasoning_effort": told}


def test_harmony_is_read_by_its_channels_even_without_tools() -> None:
    reading = plan(profile=HARMONY).reading("<|start|>assistant")
    assert not reading.is_plain
    reader = reading.reader()
    events = reader.push("<|channel|>analysis<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>C")
    assert [*events, *reader.end(cut=False)] == [Reasoning("R"), Text("C")]
    assert reading.grammar() is None


def test_structure_within_harmony_is_that_of_the_final_channel() -> None:
    enforced = Enforced(plan(profile=HARMONY, structured=JSON))
    thought = "<|channel|>analysis<|message|>R<|end|><|start|>assistant"
    assert enforced.accepts(f'{thought}<|channel|>final<|message|>{{"a": 1}}')
    assert not enforced.accepts(f"{thought}<|channel|>final<|message|>Hi")


def test_special_tokens_that_mark_parts_are_kept() -> None:
    markers = ReasoningMarkers("[THINK]", "[/THINK]")
    profile = replace(MISTRAL, reasoning=markers, special_ids={"[TOOL_CALLS]": 5, "[THINK]": 7})
    assert plan(profile=profile, tools=[F]).reading("…").kept_ids == {5, 7}
    assert plan(profile=profile).reading("…").kept_ids == {7}
    assert plan(profile=NONE).reading("…").kept_ids == frozenset()


def test_ids_are_short_where_the_template_wants_them_so() -> None:
    reader = plan(profile=MISTRAL, tools=[F]).reading("…").reader()
    [begin, *_] = reader.push('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert isinstance(begin, CallBegin)
    assert len(begin.id) == 9


@pytest.mark.parametrize(
    ("mode", "raw", "reason", "finish"),
    [
        ("auto", "Hi", "stop", "stop"),
        ("auto", hermes("{}"), "stop", "tool_calls"),
        ("required", hermes("{}"), "stop", "tool_calls"),
        ("named", hermes("{}"), "stop", "stop"),
        ("auto", hermes("{}"), "length", "length"),
        ("auto", hermes("{}"), "repetition", "repetition"),
        ("none", hermes("{}"), "stop", "stop"),
    ],
)
def test_finish_reasons_are_openais(mode: Any, raw: str, reason: str, finish: str) -> None:
    made = plan(tools=[F], choice=ToolChoice(mode=mode, name="f" if mode == "named" else None))
    reader = made.reading("…").reader()
    reader.push(raw)
    reader.end(cut=reason == "length")
    assert made.finish_reason(reason, reader) == finish


def test_choice_needs_a_name_if_and_only_if_it_is_named() -> None:
    for asked in ({"mode": "named"}, {"mode": "auto", "name": "f"}):
        with pytest.raises(BadRequest):
            ToolChoice(**asked)  # type: ignore[arg-type]

"""What a reader makes of raw answers. Each is read at every cut: one character at a time, two, three, five, eight, all
at once, and at random ones.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_call_grammar import CALLS

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.answers.formats import FORMATS
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.reader import AnswerReader, new_id, new_short_id
from ostro.answers.tools import Tool

THINK = ReasoningMarkers("<think>", "</think>")
SIZES = (1, 2, 3, 5, 8, 100_000)
_SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "s": {"type": "string"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
    },
    "$defs": {"place": {"enum": ["1", "2"]}},
}
TOOLS = {
    "f": Tool(name="f", parameters=_SCHEMA),
    "g": Tool(name="g"),
    "c": Tool(name="c", is_custom=True),
}


def joined(events: Iterable[Event]) -> list[Event]:
    """With the pieces of each part put together."""
    whole: list[Event] = []
    for event in events:
        match whole[-1] if whole else None, event:
            case Text(before), Text(text):
                whole[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                whole[-1] = CallArguments(index, before + text)
            case _:
                whole.append(event)
    return whole


def new_reader(format: str | None = None, **options: Any) -> AnswerReader:
    ids = count()
    chosen = None if format is None else FORMATS[format]
    return AnswerReader(format=chosen, tools=TOOLS, new_id=lambda: f"id{next(ids)}", **options)


def events_of(reader: AnswerReader, pieces: Iterable[str], *, cut: bool = False) -> list[Event]:
    events = [event for piece in pieces for event in reader.push(piece)]
    events += reader.end(cut)
    whole = joined(events)
    assert reader.text == "".join(event.text for event in whole if isinstance(event, Text))
    assert reader.reasoning == "".join(event.text for event in whole if isinstance(event, Reasoning))
    begun = [event for event in whole if isinstance(event, CallBegin)]
    assert [(call.id, call.name, call.is_custom) for call in reader.calls] == [
        (event.id, event.name, event.is_custom) for event in begun
    ]
    assert [event.index for event in begun] == list(range(len(begun)))
    for index, call in enumerate(reader.calls):
        said = [event.text for event in whole if isinstance(event, CallArguments) and event.index == index]
        assert call.arguments == "".join(said)
    return whole


def read(raw: str, format: str | None = None, *, cut: bool = False, **options: Any) -> list[Event]:
    """The joined events, after a check that they are the same at every cut."""
    results = [
        events_of(new_reader(format, **options), (raw[at : at + size] for at in range(0, len(raw), size)), cut=cut)
        for size in SIZES
    ]
    assert all(result == results[-1] for result in results), results
    return results[-1]


def call(index: int, name: str, arguments: str, *, custom: bool = False) -> list[Event]:
    begin = CallBegin(index, f"id{index}", name, custom)
    return [begin, CallArguments(index, arguments)] if arguments else [begin]


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Reasoning


@pytest.mark.parametrize(
    ("raw", "in_reasoning", "reasoning", "text"),
    [
        ("<think>R</think>C", False, "R", "C"),
        ("<think>\nR\nS\n</think>\n\n\nC", False, "R\nS\n", "\nC"),
        ("R</think>C", True, "R", "C"),
        ("R", True, "R", ""),
        ("All of it.", False, "", "All of it."),
        ("\n<think>R</think>C", False, "R", "C"),
        ("Say <think>.", False, "", "Say <think>."),
        ("R </thin", True, "R </thin", ""),
        (" <thin", False, "", " <thin"),
        ("<think></think>C", False, "", "C"),
    ],
)
@pytest.mark.parametrize("format", [None, "hermes"])
def test_reasoning_is_split_from_the_text(
    raw: str, in_reasoning: bool, reasoning: str, text: str, format: str | None
) -> None:
    events = read(raw, format, markers=THINK, in_reasoning=in_reasoning)
    assert events == [*([Reasoning(reasoning)] if reasoning else []), *([Text(text)] if text else [])]


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        ("<|channel>thought\nSo.\n<channel|>Hi", [Reasoning("So.\n"), Text("Hi")]),
        ("<|channel>thought\nthought\n<channel|>Hi", [Reasoning("thought\n"), Text("Hi")]),
        ("<|channel>So.<channel|>Hi", [Reasoning("So."), Text("Hi")]),
        ("thought\nHi", [Text("thought\nHi")]),
        ("<|channel>tho", [Reasoning("tho")]),
    ],
    ids=["labelled", "twice", "unlabelled", "text", "cut"],
)
def test_a_channels_name_is_not_reasoning(raw: str, events: list[Event]) -> None:
    """Gemma 4's reasoning and its markers were parts of the answer."""
    assert read(raw, markers=ReasoningMarkers("<|channel>", "<channel|>", label="thought"), cut=True) == events


def test_reader_knows_whether_it_is_in_the_reasoning() -> None:
    reader = new_reader(markers=THINK)
    reader.push("<think>")
    assert reader.is_reasoning
    reader.push("a</think>b")
    assert not reader.is_reasoning


def test_call_inside_the_reasoning_stays_reasoning() -> None:
    """Case 24."""
    thought = f"I could say {hermes('{}')}, but no."
    assert read(f"<think>{thought}</think>Hi", "hermes", markers=THINK) == [Reasoning(thought), Text("Hi")]


def test_call_after_reasoning_without_an_end_is_a_call() -> None:
    """Case 25: Qwen3 forgets the marker."""
    raw = f"I call it. {hermes('{}')}"
    assert read(raw, "hermes", markers=THINK, in_reasoning=True) == [Reasoning("I call it. "), *call(0, "f", "{}")]


def test_call_in_unfinished_reasoning_is_not_executed() -> None:
    raw = f"Perhaps {hermes('{}')} or"
    assert read(raw, "hermes", cut=True, markers=THINK, in_reasoning=True) == [Reasoning(raw)]


def test_call_after_the_reasoning_is_a_call() -> None:
    raw = f"<think>\nR\n</think>\n\n{hermes('{}')}"
    assert read(raw, "hermes", markers=THINK) == [Reasoning("R\n"), *call(0, "f", "{}")]


# Text


@pytest.mark.parametrize("raw", ["Plain text.\n", "a < b and <tool", "<tool_call", "<", "", " \n", "\n\nHi\n\n"])
def test_text_without_a_call_is_whole(raw: str) -> None:
    """Cases 1 and 2."""
    assert read(raw, "hermes") == ([Text(raw)] if raw else [])


def test_call_like_text_is_text_if_there_are_no_tools() -> None:
    """Case 23."""
    assert read(hermes("{}")) == [Text(hermes("{}"))]


def test_text_is_not_held_back_longer_than_a_marker_may_take() -> None:
    reader = new_reader("hermes")
    assert reader.push("Hi <tool") == [Text("Hi")]
    assert reader.push("s") == [Text(" <tools")]


# Calls


def test_text_and_a_call_both_come_out() -> None:
    """Case 3."""
    raw = 'Hi!<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    assert read(raw, "hermes") == [Text("Hi!"), *call(0, "f", '{"x": 1}')]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": true}',
        '{"x": 1}',
        '{"x": null}',
        '{"x": [1, 2]}',
        '{"x": {"y": {}}}',
        "{}",
        "{ }",
        '{"s": "</tool_call>"}',
        r'{"s": "{[\"\\ \u0041\n"}',
        '{"b": 1,"a" :2 , "é": "日本語 🙂"}',
        '{"s": "\\\\"}',
        '{\n  "x": 1\n}',
    ],
)
def test_arguments_are_passed_on_as_they_are_written(arguments: str) -> None:
    """Cases 4, 5, 13, 14, 15 and 16."""
    assert read(hermes(arguments), "hermes") == call(0, "f", arguments)


@pytest.mark.parametrize("body", ['{"name": "f"}', '{"name": "f", "arguments": null}', '{"name": "g"}'])
def test_call_without_arguments_has_an_empty_object(body: str) -> None:
    """Cases 6 and 7."""
    name = json.loads(body)["name"]
    assert read(f"<tool_call>{body}</tool_call>", "hermes") == call(0, name, "{}")


def test_several_calls_are_counted_in_their_order() -> None:
    """Cases 8, 9, 10 and 11."""
    raw = hermes('{"x": 1}', "g") + hermes('{"x": 2}') + "\n" + hermes("{}", "g")
    assert read(raw, "hermes") == [*call(0, "g", '{"x": 1}'), *call(1, "f", '{"x": 2}'), *call(2, "g", "{}")]


def test_ids_are_unique_and_of_the_form_that_is_wanted() -> None:
    """Cases 10 and 31."""
    ids = [make() for make in (new_id, new_short_id) for _ in range(100)]
    assert len(set(ids)) == 200
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", each) for each in ids[:100])
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids[100:])


def test_arguments_arrive_before_the_call_is_complete() -> None:
    reader = new_reader("hermes")
    assert joined(reader.push('<tool_call>\n{"name": "f", "arguments": {"s": "a b')) == call(0, "f", '{"s": "a b')


def test_limit_within_the_arguments_leaves_them_partial() -> None:
    """Case 17."""
    raw = 'Hi <tool_call>\n{"name": "f", "arguments": {"s": "ab'
    assert read(raw, "hermes", cut=True) == [Text("Hi"), *call(0, "f", '{"s": "ab')]


@pytest.mark.parametrize("raw", ["<tool_", "<tool_call>", '<tool_call>\n{"name": "f', '<tool_call>{"name": "f", "arg'])
def test_limit_before_the_arguments_leaks_no_markup(raw: str) -> None:
    """Cases 18 and 27. Half a marker is text: nobody knows what it would have become."""
    assert read(raw, "hermes", cut=True) == ([Text(raw)] if raw == "<tool_" else [])


def test_half_a_marker_at_a_limit_is_no_text_where_a_call_is_expected() -> None:
    assert read(hermes("{}") + "\n<tool_", "hermes", cut=True) == call(0, "f", "{}")
    assert read(hermes("{}") + "\n<tool_", "hermes") == [*call(0, "f", "{}"), Text("<tool_")]
    assert read("<tool_", "hermes", cut=True, only_calls=True) == []
    assert read(hermes("{}").removesuffix("call>"), "hermes", cut=True) == call(0, "f", "{}")


@pytest.mark.parametrize("format", [*CALLS, "harmony"])
def test_limit_anywhere_in_calls_leaks_no_markup_and_invents_no_arguments(format: str) -> None:
    """Cases 17 and 18."""
    harmony = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}', "<|call|>"
    raw = "".join(harmony if format == "harmony" else CALLS[format])
    whole = new_reader(format)
    events_of(whole, [raw])
    assert whole.calls
    for end in range(len(raw)):
        reader = new_reader(format, only_calls=True)
        events_of(reader, [raw[:end]], cut=True)
        assert reader.text == "", raw[:end]
        for begun, complete in zip(reader.calls, whole.calls, strict=False):
            assert begun.name == complete.name, raw[:end]
            assert complete.arguments.startswith(begun.arguments), raw[:end]


def test_unknown_tool_is_called_and_loses_no_neighbour() -> None:
    """Case 19."""
    raw = hermes("{}", "f") + hermes('{"a": 1}', "unknown.tool") + hermes("{}", "g")
    assert read(raw, "hermes") == [*call(0, "f", "{}"), *call(1, "unknown.tool", '{"a": 1}'), *call(2, "g", "{}")]


def test_answer_ends_after_as_many_calls_as_may_come() -> None:
    """Case 22."""
    assert read(hermes("{}") + "\n" + hermes("{}") + " and", "hermes", max_calls=1) == call(0, "f", "{}")


def test_text_after_a_call_is_text() -> None:
    """Case 26."""
    assert read(hermes("{}") + "\n\nDone.\n", "hermes") == [*call(0, "f", "{}"), Text("Done.\n")]


def test_complete_call_without_its_closing_tag_is_a_call() -> None:
    """Case 27."""
    assert read('<tool_call>\n{"name": "f", "arguments": {"x": 1}}', "hermes") == call(0, "f", '{"x": 1}')
    raw = '<tool_call>\n{"name": "f", "arguments": {"x": 1}\n</tool_call> ok'
    assert read(raw, "hermes") == [*call(0, "f", '{"x": 1}'), Text("ok")]


@pytest.mark.parametrize(
    "raw", ["<tool_call>what?</tool_call>", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"a": 1}', "<tool_call>"]
)
def test_broken_call_is_text(raw: str) -> None:
    """Case 27."""
    assert read(raw, "hermes") == [Text(raw)]
    assert read(raw + hermes("{}"), "hermes") == [Text(raw), *call(0, "f", "{}")]


def test_name_may_come_after_the_arguments() -> None:
    """Case 28."""
    raw = '<tool_call>{"arguments": {"x": [1]}, "id": 7, "name": "f"}</tool_call>'
    assert read(raw, "hermes") == call(0, "f", '{"x": [1]}')


def test_arguments_within_a_string_are_unpacked() -> None:
    assert read(hermes(r'"{\"x\": \"\u00e9\ud83d\ude42\"}"'), "hermes") == call(0, "f", '{"x": "é🙂"}')


def test_list_of_calls_in_one_block_is_read() -> None:
    """As SmolLM2's card asks for."""
    raw = '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>'
    assert read(raw, "hermes") == [*call(0, "f", "{}"), *call(1, "g", "{}")]


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        ('{"name": "f", "arguments": {"x": 1}}', call(0, "f", '{"x": 1}')),
        ('{"name": "f", "arguments": {}}\n{"name": "g"}', [*call(0, "f", "{}"), *call(1, "g", "{}")]),
        ('```json\n{\n  "name": "f",\n  "arguments": {}\n}\n```\nOk', [*call(0, "f", "{}"), Text("Ok")]),
        ('{"name": "Oslo", "size": 1}', [Text('{"name": "Oslo", "size": 1}')]),
        ('{"a": {"name": "f"}}', [Text('{"a": {"name": "f"}}')]),
        ('```json\n{"a": 1}\n```', [Text('```json\n{"a": 1}\n```')]),
        ("```python\nf()\n```", [Text("```python\nf()\n```")]),
        ('So: {"name": "f", "arguments": {}}', [Text('So: {"name": "f", "arguments": {}}')]),
    ],
)
def test_call_without_its_tags_is_read_where_it_names_a_tool(raw: str, events: list[Event]) -> None:
    """As Qwen2.5-Coder writes it."""
    assert read(raw, "hermes") == events


def test_json_that_is_not_a_call_is_not_held_back() -> None:
    reader = new_reader("hermes")
    assert reader.push('{"answer": [1, ') == [Text('{"answer": [1,')]


def test_custom_tool_gets_its_input_as_text() -> None:
    raw = hermes(r'{"input": "a \"b\"\n\u00e9 \\"}', "c")
    assert read(raw, "hermes") == call(0, "c", 'a "b"\né \\', custom=True)


# Other formats


MANY: Mapping[str, tuple[str, list[Event]]] = {
    "mistral": (
        'Hi[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        [Text("Hi"), *call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "mistral_v11": (
        '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        [*call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "phi4_mini": (
        '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>ok',
        [*call(0, "f", '{"x": 1}'), Text("ok")],
    ),
    "functools": (
        'functools[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        [*call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "deepseek_v3": (
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Text("Hm."), *call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [*call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "llama3_json": (
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"type": "function", "name": "g", "parameters": {}}',
        [*call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "pythonic": (
        "[f(x=1, s='a'), g()]",
        [*call(0, "f", '{"x": 1, "s": "a"}'), *call(1, "g", "{}")],
    ),
    "nemotron": (
        'Let me see.<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        [Text("Let me see."), *call(0, "f", '{"x": 1}'), *call(1, "g", "{}")],
    ),
    "lfm2": (
        "Let me see.<|tool_call_start|>[f(x=1, s='a'), g()]<|tool_call_end|>",
        [Text("Let me see."), *call(0, "f", '{"x": 1, "s": "a"}'), *call(1, "g", "{}")],
    ),
    "qwen3_coder": (
        "Hi\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n 2 \n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [Text("Hi"), *call(0, "f", '{"x": 1, "s": " 2 "}'), *call(1, "g", "{}")],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        [Reasoning("Hm."), Text("Let me see."), *call(0, "f", '{"x": 1}')],
    ),
}


@pytest.mark.parametrize("format", MANY)
def test_calls_are_read_in_every_format(format: str) -> None:
    raw, events = MANY[format]
    assert read(raw, format) == events


def test_every_format_has_a_test() -> None:
    assert {*MANY, "hermes", "generic"} == {*FORMATS}


def test_messages_of_harmony_are_paragraphs() -> None:
    raw = "<|channel|>commentary<|message|>Preamble<|end|><|start|>assistant<|channel|>final<|message|>"
    assert read(raw + "Hi<|return|>", "harmony") == [Text("Preamble\n\nHi")]
    assert read(raw + "<|return|>", "harmony") == [Text("Preamble")]


def test_texts_carry_their_offsets_in_the_raw_answer() -> None:
    raw = 'Hi \n<tool_call>{"name": "f", "arguments": {}}</tool_call> \n Done. '
    reader = new_reader("hermes")
    found = [event for event in reader.push(raw) + reader.end(cut=False) if isinstance(event, Text)]
    assert "".join(event.text for event in found) == "HiDone. "
    assert [raw[event.begin :][: len(event.text)] for event in found] == [event.text for event in found]


@pytest.mark.parametrize("format", [*MANY])
def test_plain_text_is_text_in_every_format(format: str) -> None:
    text = ' <{["Plain f(x) text.\n'
    assert read(text, format) == [Text(text)]


@pytest.mark.cases(5)
@pytest.mark.parametrize("format", [*MANY])
def test_every_beginning_of_an_answer_is_read_alike_at_every_cut(format: str) -> None:
    raw, _ = MANY[format]
    for end in range(len(raw)):
        for cut in (False, True):
            whole = events_of(new_reader(format), [raw[:end]], cut=cut)
            assert events_of(new_reader(format), raw[:end], cut=cut) == whole


@pytest.mark.parametrize(
    "raw", ['{"a": 1}', '{"name": "Oslo", "size": 3}', "{", "[1, 2]", "[f]", "It is {x}.", '["f(x)"]']
)
@pytest.mark.parametrize("format", ["llama3_json", "pythonic"])
def test_answer_that_names_no_tool_is_text(raw: str, format: str) -> None:
    """Case 29."""
    assert read(raw, format) == [Text(raw)]


def test_llama_call_needs_no_marker() -> None:
    assert read('\n{"name": "f", "parameters": {"x": 1}}', "llama3_json") == call(0, "f", '{"x": 1}')


def test_python_values_become_json() -> None:
    """Case 30."""
    raw = """[f(a="x]", b=[1, {"k": None}], c=True, d='it\\'s "so"', e=-1.5e3, h=(1,), i={}, j="é\\n"), g()]"""
    arguments = (
        r'{"a": "x]", "b": [1, {"k": null}], "c": true, "d": "it'
        r"""'s \"so\"", "e": -1.5e3, "h": [1], "i": {}, "j": "é\n"}"""
    )
    assert read(raw, "pythonic") == [*call(0, "f", arguments), *call(1, "g", "{}")]
    assert json.loads(arguments)


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ("<parameter=x>\n5\n</parameter>\n", '{"x": 5}'),
        ("<parameter=s>\n5\n</parameter>\n", '{"s": "5"}'),
        ("<parameter=s>\n  a\n b \n</parameter>\n", '{"s": "  a\\n b "}'),
        ("<parameter=s>\n\n</parameter>\n", '{"s": ""}'),
        ("<parameter=either>\nnull\n</parameter>\n", '{"either": null}'),
        ("<parameter=either>\n7\n</parameter>\n", '{"either": 7}'),
        ("<parameter=either>\nseven\n</parameter>\n", '{"either": "seven"}'),
        ("<parameter=place>\n1\n</parameter>\n", '{"place": "1"}'),
        ("<parameter=flag>\nTrue\n</parameter>\n", '{"flag": true}'),
        ('<parameter=list>\n[1, "a"]\n</parameter>\n', '{"list": [1, "a"]}'),
        ("<parameter=other>\n{\n</parameter>\n", '{"other": "{"}'),
        ("<parameter=x>\n5\n<parameter=s>\na\n", '{"x": 5, "s": "a"}'),
        ("<parameter=s>a</parameter>", '{"s": "a"}'),
    ],
)
def test_tagged_values_are_typed_by_the_schema(values: str, arguments: str) -> None:
    """Case 32."""
    raw = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    assert read(raw, "qwen3_coder") == call(0, "f", arguments)


def test_custom_tools_are_read_in_formats_without_json() -> None:
    tagged = "<tool_call>\n<function=c>\n<parameter=input>\n{1}\n</parameter>\n</function>\n</tool_call>"
    assert read(tagged, "qwen3_coder") == call(0, "c", "{1}", custom=True)
    assert read("[c(input='{1}')]", "pythonic") == call(0, "c", "{1}", custom=True)


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        ("<|channel|>final<|message|>Hi", [Text("Hi")]),
        ("Hi", [Text("Hi")]),
        (" Hi", [Text(" Hi")]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            [Reasoning("a"), Text("b")],
        ),
        (
            ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"x": "<|end|>"}',
            call(0, "f", '{"x": "<|end|>"}'),
        ),
        ("<|channel|>analysis<|message|>a", [Reasoning("a")]),
        ("<|channel|>analy", []),
    ],
)
def test_harmony_is_read_by_its_channels(raw: str, events: list[Event]) -> None:
    assert read(raw, "harmony") == events


# Any text at all

PARTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', '{"x": "', "\\", '"'),
    *("}", "[", "]", "{", "\n", " ", "a", "é🙂", "<function=f>", "<parameter=x>", "</parameter>", "</function>"),
    *("[TOOL_CALLS]", "[ARGS]", "f", "(", ")", "=", ",", "1", "'", "functools", "<|channel|>", "<|message|>"),
    *("analysis", " to=functions.f", "<|python_tag|>", "<", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "\\ud83d", "\\u00"),
)


@settings(max_examples=examples(300))
@given(
    st.lists(st.sampled_from(PARTS), max_size=24),
    st.sampled_from([None, *FORMATS]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_no_cut_changes_what_is_read(
    parts: list[str], format: str | None, in_reasoning: bool, cut: bool, data: st.DataObject
) -> None:
    raw = "".join(parts)
    borders = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=10)))
    pieces = [raw[begin:end] for begin, end in zip([0, *borders], [*borders, len(raw)], strict=True)]

    def reader() -> AnswerReader:
        return new_reader(format, markers=THINK, in_reasoning=in_reasoning)

    whole = events_of(reader(), [raw], cut=cut)
    assert events_of(reader(), pieces, cut=cut) == whole
    assert events_of(reader(), raw, cut=cut) == whole


# Cost

COSTLY = {
    "space": ("", " "),
    "space after text": ("a", "\n "),
    "space in a message": ("<|channel|>final<|message|>", " "),
    "arguments before the name": ('<tool_call>{"arguments": {"x": "', "a"),
    "a call in a thought": ("<think><tool_call>", "a"),
    "a name": ("[TOOL_CALLS]", "f"),
}


class Counted(str):
    """A text that counts the characters of all texts that are made from it by joining or cutting."""

    made = 0

    def __add__(self, other: str) -> "Counted":
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> "Counted":
        return self._counted(other + str(self))

    def __getitem__(self, key: Any) -> "Counted":
        return self._counted(str.__getitem__(self, key))

    def _counted(self, text: str) -> "Counted":
        Counted.made += len(text)
        return Counted(text)


@pytest.mark.cases(8)
@pytest.mark.parametrize("kind", COSTLY)
@pytest.mark.parametrize("format", ["hermes", "mistral_v11", "harmony"])
def test_reading_costs_what_the_text_is_long_not_its_square(format: str, kind: str) -> None:
    """White space was joined to all that was held back before with every token, and so was held text: an answer of
    nothing else took the event loop seconds.
    """
    lead, unit = COSTLY[kind]
    copied = []
    for count_ in (500, 4_000):
        Counted.made = 0
        reader = new_reader(format, markers=THINK)
        for piece in [lead, *(Counted(unit) for _ in range(count_))]:
            reader.push(Counted(piece))
        reader.end(cut=False)
        copied.append(Counted.made)
    assert copied[1] < 24 * max(copied[0], 1_000)


def test_held_space_is_told_where_it_began() -> None:
    reader = new_reader("hermes", markers=THINK)
    events = [event for piece in ("a", " ", "\n", " ", "b", " ", " ") for event in reader.push(piece)]
    events += reader.end(cut=False)
    assert [(each.text, each.begin) for each in events if isinstance(each, Text)] == [("a", 0), (" \n b", 1), ("  ", 5)]

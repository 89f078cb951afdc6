"""Grammars of answers, tried out with the library that enforces them: what is accepted, what is refused, and where
nothing is enforced.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ostro.answers.call_grammar import GrammarRequest, answer_grammar
from ostro.answers.formats import FORMATS
from ostro.answers.profile import ReasoningMarkers
from ostro.answers.tools import ANY_OBJECT, Tool

THINK = ReasoningMarkers("<think>", "</think>")
F = Tool(
    name="f",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "s": {"type": "string"},
            "flag": {"type": "boolean"},
            "where": {"$ref": "#/$defs/where"},
        },
        "required": ["x"],
        "$defs": {"where": {"enum": ["here", "there"]}},
    },
)
G = Tool(name="g")
PLAIN_SPECIALS = ("<|eos|>",)


class Vocabulary:
    """One token for each byte, and the special ones after these."""

    def __init__(self, specials: Sequence[str]) -> None:
        self.specials = {text: 256 + number for number, text in enumerate((*PLAIN_SPECIALS, *specials))}
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in self.specials)]
        self.special_token_ids = list(self.specials.values())
        self.eos_token_id = 256
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def ids(self, text: str) -> list[int]:
        """With special tokens for their texts."""
        ids: list[int] = []
        while text:
            special = next((each for each in self.specials if text.startswith(each)), None)
            ids += [self.specials[special]] if special else list(text[0].encode())
            text = text[len(special or "a") :]
        return ids


@dataclass
class Outcome:
    read: str
    """The accepted text."""
    free: str
    """For each token whether the output could have ended before it, and so is not enforced if lazy: 1 or 0."""
    may_end: bool
    is_over: bool


class Grammar:
    def __init__(self, format: str, *, specials: Sequence[str] = (), tools: Sequence[Tool] = (F, G), **asked: Any):
        self.vocabulary = Vocabulary(specials)
        self.grammar = answer_grammar(
            GrammarRequest(format=FORMATS[format], tools=tuple(tools), special_ids=self.vocabulary.specials, **asked)
        )
        self.tokenizer = LLTokenizer(TokenizerWrapper(self.vocabulary), eos_token=256)

    def read(self, text: str) -> Outcome:
        matcher = LLMatcher(self.tokenizer, self.grammar, log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{self.grammar}"
        read, free = b"", ""
        for token in self.vocabulary.ids(text):
            before = matcher.is_accepting()
            if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
                return Outcome(read.decode(errors="replace"), free, before, matcher.is_stopped())
            read += self.vocabulary.tokens[token]
            free += "1" if before else "0"
        return Outcome(read.decode(), free, matcher.is_accepting(), matcher.is_stopped())

    def accepts(self, text: str) -> bool:
        outcome = self.read(text)
        return outcome.read == text and outcome.may_end

    def refused_at(self, text: str) -> str:
        """The rest, from the first token that does not fit."""
        return text.removeprefix(self.read(text).read)


def specials_of(format: str) -> tuple[str, ...]:
    """None for those whose markers are text in most vocabularies."""
    return () if "qwen" in format or format in ("hermes", "generic", "functools") else FORMATS[format].special


CALLS: Mapping[str, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1, "where": "here"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n <a>\n \n</parameter>\n"
        "<parameter=flag>\nTrue\n</parameter>\n<parameter=where>\nthere\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}',
        ', {"name": "g", "arguments": {}}]',
    ),
    "mistral_v11": ('[TOOL_CALLS]f[ARGS]{"x": 1}', "[TOOL_CALLS]g[ARGS]{}"),
    "nemotron": (
        '<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}',
        ', {"name": "g", "arguments": {}}]</TOOLCALL>',
    ),
    "phi4_mini": (
        '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}',
        ', {"name": "g", "arguments": {}}]<|/tool_call|>',
    ),
    "functools": ('functools[{"name": "f", "arguments": {"x": 1}}', ', {"name": "g", "arguments": {}}]'),
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>',
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "llama3_json": ('{"name": "f", "parameters": {"x": 1}}', '; {"name": "g", "parameters": {}}'),
    "pythonic": ('[f(x=1, flag=True, where="here")', ", g()]"),
    "lfm2": ('<|tool_call_start|>[f(x=1, flag=True, where="here")', ", g()]<|tool_call_end|>"),
}
"""A first call, and a second one after it."""


@pytest.mark.parametrize("format", CALLS)
@pytest.mark.parametrize("mode", ["lazy", "forced"])
@pytest.mark.parametrize("special", [False, True])
def test_calls_are_accepted(format: str, mode: str, special: bool) -> None:
    grammar = Grammar(format, mode=mode, specials=specials_of(format) if special else ())
    assert grammar.accepts("".join(CALLS[format]))


@pytest.mark.parametrize("format", CALLS)
@pytest.mark.parametrize("mode", ["lazy", "forced"])
def test_no_second_call_starts_if_only_one_may_come(format: str, mode: str) -> None:
    grammar = Grammar(format, mode=mode, several=False, specials=specials_of(format))
    first, second = CALLS[format]
    whole = first + second
    read = grammar.read(whole).read
    assert first.startswith(read[: len(first)]), read
    assert "g" not in read[len(first) :], read


@pytest.mark.parametrize("format", CALLS)
def test_argument_that_does_not_fit_the_schema_is_refused(format: str) -> None:
    first, _ = CALLS[format]
    wrong = first.replace("1", '"', 1)
    for mode in ("lazy", "forced"):
        grammar = Grammar(format, mode=mode, specials=specials_of(format))
        assert grammar.refused_at(wrong).startswith('"'), mode


@pytest.mark.parametrize("format", CALLS)
def test_unknown_tool_is_refused_where_calls_are_forced(format: str) -> None:
    first, _ = CALLS[format]
    wrong = first.replace("f", "unknown", 1) if not first.startswith("functools") else first.replace('"f"', '"unknown"')
    grammar = Grammar(format, mode="forced", specials=specials_of(format))
    assert grammar.refused_at(wrong).startswith(("unknown", "tool_call", "|"))


@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.may_be_bare])
def test_call_without_its_tags_is_enforced_from_its_name_on(format: str) -> None:
    grammar = Grammar(format, mode="lazy")
    call = '{"name": "f", "arguments": {"x": 1}}'
    assert grammar.read(call).free == "1" * len('{"name": "f"') + "0" * len(', "arguments": {"x": 1}}')
    assert grammar.accepts(f'{call}\n{{"name": "g", "arguments": {{}}}}')
    assert grammar.accepts('{"name": "Oslo", "size": 3}')
    assert grammar.refused_at(call.replace("1", '"')).startswith('"')
    assert not Grammar(format, mode="lazy", several=False).accepts(f"{call}\n{call}")


@pytest.mark.parametrize("format", CALLS)
def test_free_text_is_free(format: str) -> None:
    grammar = Grammar(format, mode="lazy", specials=specials_of(format))
    text = 'Hi, <tool_ {"a": 1} [1] f(x) \n\n{"name": "f"}'
    outcome = grammar.read(text)
    assert (outcome.read, {*outcome.free}, outcome.may_end) == (text, {"1"}, True)


@pytest.mark.parametrize("format", CALLS)
def test_call_is_enforced_from_its_marker_to_its_end(format: str) -> None:
    """Where there is no marker, from where it can be nothing but a call."""
    begin = FORMATS[format].begin or ("[f(" if format == "pythonic" else '{"name": "f"')
    grammar = Grammar(format, mode="lazy", specials=specials_of(format))
    first, _ = CALLS[format]
    outcome = grammar.read(first)
    assert outcome.read == first
    num_before = len(grammar.vocabulary.ids(begin))
    assert outcome.free[:num_before] == "1" * num_before
    assert {*outcome.free[num_before:]} == {"0"}


@pytest.mark.parametrize("format", ["hermes", "mistral", "deepseek_v31"])
@pytest.mark.parametrize("special", [False, True])
def test_nothing_is_enforced_in_reasoning(format: str, special: bool) -> None:
    specials = (*specials_of(format), *(("<think>", "</think>") if special else ()))
    grammar = Grammar(format, mode="lazy", reasoning=THINK, specials=specials)
    first, second = CALLS[format]
    thought = "\n<think>\nI think of <tool_call> and"
    outcome = grammar.read(thought)
    assert (outcome.read, {*outcome.free}, outcome.may_end) == (thought, {"1"}, True)
    assert grammar.accepts(f"{thought}</think>\n\nHi {first}{second}")
    assert grammar.accepts(f"Hi {first}{second}")
    wrong = first.replace("1", '"', 1)
    assert grammar.refused_at(f"{thought}</think>{wrong}").startswith('"')


@pytest.mark.parametrize("special", [False, True])
def test_forced_calls_may_come_after_reasoning(special: bool) -> None:
    specials = ("<think>", "</think>") if special else ()
    grammar = Grammar("hermes", mode="forced", reasoning=THINK, specials=specials)
    first, second = CALLS["hermes"]
    assert grammar.accepts(f"<think>\nHm <tool_call>.\n</think>\n\n{first}{second}")
    assert grammar.accepts(first)
    assert not grammar.accepts("<think>\nHm.")
    assert grammar.refused_at("<think>Hm.</think>No.") == "No."


def test_forced_calls_after_reasoning_that_the_prompt_began_may_have_line_breaks_before_them() -> None:
    grammar = Grammar("hermes", mode="forced", after_reasoning=True)
    first, _ = CALLS["hermes"]
    assert grammar.accepts(first)
    assert grammar.accepts(f"\n\n{first}")
    assert not grammar.accepts(f"\n\n\n{first}")


@pytest.mark.parametrize(
    ("format", "call"),
    [
        ("pythonic", '[f(a=1, b_c=["x"])]'),
        ("pythonic", "[f()]"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
    ],
)
@pytest.mark.parametrize(
    "tool",
    [
        Tool(name="f", parameters={"type": "object"}),
        Tool(name="f", parameters={"anyOf": [{"type": "object"}]}),
        Tool(name="f", parameters={"properties": {"q": {}}, "required": ["q"]}, enforced=ANY_OBJECT),
    ],
)
def test_tool_whose_arguments_are_not_described_takes_any(format: str, call: str, tool: Tool) -> None:
    assert Grammar(format, mode="forced", tools=[tool]).accepts(call)


def test_forced_call_is_complete_when_only_one_may_come() -> None:
    grammar = Grammar("hermes", mode="forced", several=False, tools=[F])
    assert grammar.read(CALLS["hermes"][0]).is_over


def test_text_may_have_a_structure_beside_calls() -> None:
    for structure, text in (
        ('%json {"type": "object"}', '{"b":[]}'),
        ('"yes" | "no"', "no"),
        (r"/a\/b\n+/", "a/b\n\n"),
    ):
        grammar = Grammar("hermes", mode="either", structure=structure)
        assert grammar.accepts(text)
        assert grammar.accepts("".join(CALLS["hermes"]))
        assert grammar.refused_at("Hi") == "Hi"


@pytest.mark.parametrize("format", CALLS)
def test_calls_are_held_to_what_can_be_enforced_of_a_schema(format: str) -> None:
    relaxed = {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}, "$defs": {"y": {"type": "integer"}}}
    tool = Tool(name="f", parameters={"properties": {"x": {"$ref": "http://y"}}}, enforced=relaxed)
    grammar = Grammar(format, mode="forced", tools=[tool, G], specials=specials_of(format))
    first, second = OTHER_CALLS.get(format, CALLS[format])
    assert grammar.accepts(first + second)
    assert grammar.refused_at(first.replace("1", '"', 1)).startswith('"')


OTHER_CALLS = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ""),
    "qwen3_coder": ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", ""),
    "pythonic": ("[f(x=1)]", ""),
    "lfm2": ("<|tool_call_start|>[f(x=1)]<|tool_call_end|>", ""),
}
"""Where `CALLS` has more arguments."""


HARMONY = FORMATS["harmony"].special


@pytest.mark.parametrize("mode", ["lazy", "forced"])
def test_harmony_calls_are_enforced_from_their_recipient_on(mode: str) -> None:
    grammar = Grammar("harmony", mode=mode, specials=HARMONY)
    thought = "<|channel|>analysis<|message|>Hm, to=functions.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
    assert grammar.accepts(thought + call)
    assert grammar.accepts(call)
    assert grammar.refused_at(call.replace("1", "a")).startswith("a")
    assert grammar.refused_at(call.replace("functions.f", "functions.h")).startswith("h")
    said = f"{thought}<|channel|>final<|message|>Hi"
    assert grammar.accepts(said) == (mode == "lazy")
    if mode == "lazy":
        assert {*grammar.read(said).free} == {"1"}


@pytest.mark.parametrize(
    ("parameters", "arguments", "accepted"),
    [
        (None, "{}", True),
        (None, '{"a": 1}', False),
        ({"type": "object", "properties": {}}, "{}", True),
        ({"type": "object", "properties": {}}, '{"a": 1}', False),
        ({"type": "object"}, '{"a": 1}', True),
        ({}, '{"a": [1, 2]}', True),
        ({}, "1", False),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "b": 2}', False),
        ({"properties": {"a": {}}, "additionalProperties": True}, '{"a": 1, "b": 2}', True),
        ({"anyOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}]}, '{"a": 1}', True),
        ({"properties": {"a": {"type": "integer"}}, "x-guidance": {"item_separator": "x"}}, '{"a": 1}', True),
        ({"properties": {"a": {"not": {}}}}, '{"a": 1}', True),
    ],
)
def test_arguments_are_those_that_the_tool_describes(parameters: Any, arguments: str, accepted: bool) -> None:
    grammar = Grammar("hermes", mode="forced", tools=[Tool(name="f", parameters=parameters)])
    raw = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert grammar.accepts(raw) == accepted


def test_tool_that_is_not_enforced_takes_any_object() -> None:
    tool = Tool(name="f", parameters={"properties": {"a": {"type": "integer"}}}, enforced=ANY_OBJECT)
    grammar = Grammar("hermes", mode="forced", tools=[tool])
    assert grammar.accepts('<tool_call>\n{"name": "f", "arguments": {"a": "b", "c": {}}}\n</tool_call>')


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "pythonic"])
def test_custom_tool_takes_text_that_matches_its_expression(format: str) -> None:
    tool = Tool(name="c", is_custom=True, regex="[a-z]+/?")
    written = {
        "hermes": '<tool_call>\n{"name": "c", "arguments": {"input": "%s"}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=c>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>",
        "pythonic": '[c(input="%s")]',
    }[format]
    grammar = Grammar(format, mode="forced", tools=[tool])
    assert grammar.accepts(written % "ab")
    if format != "qwen3_coder":
        assert not grammar.accepts(written % "a1")


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
@pytest.mark.parametrize("given", ["", "a", "b", "c", "ab", "ac", "bc", "abc"])
def test_python_arguments_come_in_order_with_commas_between(required: list[str], given: str) -> None:
    tool = Tool(
        name="f", parameters={"properties": {name: {"type": "integer"} for name in "abc"}, "required": required}
    )
    call = f"[f({', '.join(f'{name}=1' for name in given)})]"
    assert Grammar("pythonic", mode="forced", tools=[tool]).accepts(call) == ({*required} <= {*given})


def test_names_and_values_are_escaped() -> None:
    tool = Tool(name='a"b\\c', parameters={"properties": {'q"\n': {"enum": ["</tool_call>", 'x"y']}}})
    grammar = Grammar("hermes", mode="forced", tools=[tool])
    call = json.dumps({"name": tool.name, "arguments": {'q"\n': 'x"y'}})
    assert grammar.accepts(f"<tool_call>\n{call}\n</tool_call>")


def test_many_tools_make_one_grammar() -> None:
    """Case 39."""
    tools = [Tool(name=f"tool_{number}", parameters=F.parameters) for number in range(128)]
    grammar = Grammar("hermes", mode="lazy", tools=tools)
    assert grammar.accepts('<tool_call>\n{"name": "tool_127", "arguments": {"x": 1}}\n</tool_call>')
    assert grammar.refused_at('<tool_call>\n{"name": "tool_128"').startswith('8"')

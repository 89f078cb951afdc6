"""Whatever a model would write, the grammar lets nothing through that the reader does not find to be valid calls."""

import json
import random
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher
from test_call_grammar import CALLS, Grammar, specials_of

from ostro.answers.formats import FORMATS
from ostro.answers.reader import AnswerReader
from ostro.answers.tools import Tool

PLACE = Tool(
    name="place",
    parameters={
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["town", "village"]},
            "is_old": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["city", "kind"],
    },
)
NOW = Tool(name="now")
PATCH = Tool(name="patch", is_custom=True, regex="[a-z ]{1,12}")
TOOLS = {tool.name: tool for tool in (PLACE, NOW, PATCH)}
# What ends texts and calls, so that they do end.
_CLOSING = b'"\n<|`\xef};)]'


def written(grammar: Grammar, seed: int) -> Iterator[int]:
    """What a model writes that has no idea: any of the tokens that are allowed."""
    draw = random.Random(seed)
    # Nobody writes this by chance.
    tag_end = list(b"\n</parameter>\n")
    matcher = LLMatcher(grammar.tokenizer, grammar.grammar, log_level=0)
    for _ in range(2_000):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(grammar.vocabulary.tokens)) if mask[token // 8] >> token % 8 & 1]
        if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.5):
            return
        allowed = [token for token in allowed if token != grammar.vocabulary.eos_token_id]
        closing = [token for token in allowed if token < 256 and token in _CLOSING]
        tokens = [draw.choice(closing if closing and draw.random() < 0.5 else allowed)]
        if draw.random() < 0.1 and matcher.validate_tokens(tag_end) == len(tag_end):
            tokens = tag_end
        assert matcher.consume_tokens(tokens), matcher.get_error()
        yield from tokens
    pytest.fail("it does not end")


ODD_NAMES = ("my key", "a=b", "a", "x>y", 'é\n"ü"', "1st", "$ref()")


@pytest.mark.cases(10)
@pytest.mark.parametrize("format", [*CALLS, "harmony"])
@pytest.mark.parametrize("cut", [False, True])
def test_arguments_may_have_any_names(format: str, cut: bool) -> None:
    schema = {"properties": {name: {"const": number} for number, name in enumerate(ODD_NAMES)}}
    tool = Tool(name="f", parameters={**schema, "required": [*ODD_NAMES]})
    grammar = Grammar(format, mode="forced", tools=(tool,), specials=specials_of(format), several=False)
    raw = b"".join(grammar.vocabulary.tokens[token] for token in written(grammar, 0)).decode()
    whole = {name: number for number, name in enumerate(ODD_NAMES)}
    for end in range(len(raw)) if cut else (len(raw),):
        reader = AnswerReader(format=FORMATS[format], tools={"f": tool}, only_calls=True)
        for character in raw[:end]:
            reader.push(character)
        reader.end(cut=cut)
        assert not reader.text
        assert all(json.dumps(whole, ensure_ascii=False).startswith(call.arguments) for call in reader.calls)
    assert cut or json.loads(reader.calls[0].arguments) == whole


@pytest.mark.cases(33)
@pytest.mark.parametrize("format", [*CALLS, "harmony"])
@pytest.mark.parametrize("seed", range(6))
def test_every_output_of_the_grammar_is_read_as_valid_calls(format: str, seed: int) -> None:
    grammar = Grammar(format, mode="forced", tools=tuple(TOOLS.values()), specials=specials_of(format))
    data = b"".join(grammar.vocabulary.tokens[token] for token in written(grammar, seed))
    reader = AnswerReader(format=FORMATS[format], tools=TOOLS)
    for character in data.decode():
        reader.push(character)
    reader.end(cut=False)
    assert reader.calls, data
    assert not reader.text, data
    for call in reader.calls:
        if call.name == "place":
            arguments = json.loads(call.arguments)
            assert {"city", "kind"} <= arguments.keys() <= {"city", "size", "kind", "is_old", "tags"}
            assert isinstance(arguments["city"], str)
            assert arguments["kind"] in ("town", "village")
            assert isinstance(arguments.get("is_old", True), bool)
            assert 0 <= arguments.get("size", 0) <= 99
            assert {*arguments.get("tags", [])} <= {"a", "b"}
        elif call.name == "now":
            assert call.arguments == "{}"
        else:
            assert (call.name, call.is_custom) == ("patch", True)
            assert format == "qwen3_coder" or 1 <= len(call.arguments) <= 12

"""Calls in the formats of other families over HTTP, streamed and not. The answers are scripted.

Numbers are those of the list of cases that trip servers, as in `test_http_tools`.
"""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_answers import Scripts
from sse_events import streamed
from test_http_tools import CHAT, Case, asked, function, merged, told, whole
from tool_templates import MISTRAL

SCRIPTS = Scripts()

TYPED = function(
    "f",
    {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array"},
            "c": {"type": "boolean"},
            "d": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["a", "b", "c"],
    },
)
GIVEN: dict[str, Any] = {"tools": [TYPED, function("h")]}


def called(arguments: str) -> dict[str, Any]:
    return {"calls": [("f", arguments)], "finish": "tool_calls", "given": GIVEN}


FORMATS = {
    "llama3_json": {
        "29 an object that names no tool": Case('{"a": 1}', '{"a": 1}', given=GIVEN),
        "29 an object that names another": Case('{"name": "Ann", "age": 1}', '{"name": "Ann", "age": 1}', given=GIVEN),
        "a call": Case(
            '{"name": "f", "parameters": {"a": "", "b": [], "c": true}}', **called('{"a": "", "b": [], "c": true}')
        ),
    },
    "pythonic": {
        "30 brackets and nulls within": Case(
            '[f(a="x]", b=[1, {"k": null}], c=True)]', **called('{"a": "x]", "b": [1, {"k": null}], "c": true}')
        ),
        "30 quotes of both kinds": Case(
            '[f(a="\'\\"", b=[], c=False)]', **called('{"a": "\'\\"", "b": [], "c": false}')
        ),
        "a list": Case("[1, 2]", "[1, 2]", given=GIVEN),
    },
    "qwen3_coder": {
        "32 types, and spaces of strings": Case(
            "<tool_call>\n<function=f>\n<parameter=a>\n  7\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n"
            "<parameter=c>\nTrue\n</parameter>\n<parameter=d>\nnull\n</parameter>\n</function>\n</tool_call>",
            **called('{"a": "  7", "b": [1], "c": true, "d": null}'),
        ),
        "32 a number that may be null": Case(
            "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\n[]\n</parameter>\n"
            "<parameter=c>\nfalse\n</parameter>\n<parameter=d>\n12\n</parameter>\n</function>\n</tool_call>",
            **called('{"a": "7", "b": [], "c": false, "d": 12}'),
        ),
    },
}
KEYS = {name: SCRIPTS.add(case.answer) for cases in FORMATS.values() for name, case in cases.items()}
MISTRALS = SCRIPTS.add('[TOOL_CALLS][{"name": "h", "arguments": {}}, {"name": "h", "arguments": {}}]')
DONE = SCRIPTS.add("Done.")


def both(client: httpx.Client, body: dict[str, object]) -> list[Any]:
    """The choice, whole and as its stream is merged."""
    return [whole(client, body)["choices"][0], merged(streamed(client, CHAT, body))]


@pytest.mark.parametrize("format", FORMATS)
def test_answers_in_a_format(tmp_path: Path, format: str) -> None:
    with SCRIPTS.served(tmp_path, "--tool-format", format) as live, live.client() as client:
        for name, case in FORMATS[format].items():
            for choice in both(client, asked(KEYS[name], **case.given)):
                assert told(choice["message"]) == case.calls, name
                assert (choice["message"]["content"] or None, choice["finish_reason"]) == (case.content, case.finish)


@pytest.mark.full
def test_ids_of_nine_characters_go_to_templates_that_want_them(tmp_path: Path) -> None:
    """31: both ways. Ids of another kind, from a conversation that began elsewhere, are changed for the template."""
    with SCRIPTS.served(tmp_path, template=MISTRAL) as live, live.client() as client:
        for choice in both(client, asked(MISTRALS, tools=[function("h")])):
            ids = [each["id"] for each in choice["message"]["tool_calls"]]
            assert told(choice["message"]) == [("h", "{}"), ("h", "{}")]
            assert len({id for id in ids if re.fullmatch("[A-Za-z0-9]{9}", id)}) == 2
        for sent in (ids, ["call_abcdefghijklmnopqrst", "toolu_01A09q90qw90lq917835lq9"]):
            calls = [{"id": id, **function("h", arguments="{}")} for id in sent]
            results = [{"role": "tool", "tool_call_id": id, "content": f"then {DONE}"} for id in sent]
            messages = [
                {"role": "user", "content": "Do it."},
                {"role": "assistant", "content": None, "tool_calls": calls},
                *results,
            ]
            answer = whole(client, {"messages": messages, "tools": [function("h")], "temperature": 0})
            assert answer["choices"][0]["message"]["content"] == "Done."

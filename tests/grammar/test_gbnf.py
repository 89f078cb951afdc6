"""GBNF: llama.cpp's notation means the same here."""

import re

import pytest
from constrained_text import accepts, constraint_of
from hypothesis import given
from hypothesis import strategies as st

JSON = r"""
# As llama.cpp has it.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (JSON, ["{}", '{"a": [1, -2.5e3, {"b": null}]}', '{"\\u00e9": "日本"}'], ["[1]", '{"a":1', "{1}", '{"a":  1}']),
        ('root ::= "x" [a-z]+ "y"', ["xaby", "xyy"], ["xy", "xab"]),
        ('root ::= a\na ::= "(" a ")" | ""', ["", "()", "(())"], ["(()", ")("]),
        ('root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"', ["1+(22+3)"], ["1+", "(1"]),
        ('root ::= item+\nitem ::= "- " [^\\n]+ "\\n"', ["- a\n- b\n"], ["- a", "a\n"]),
        ('root ::= ([a-c] | "é" | "\\u00fc"){2,3}', ["aé", "abü"], ["a", "abca"]),
        ('root ::= "a"{2} "b"{1,} "c"?', ["aab", "aabbbc"], ["ab", "aabcc"]),
        ("root ::= . [^a] [-x] [\\]]", ["\n\n-]", "ab x]".replace(" ", "")], ["aa-]"]),
        ('root ::= "a" |\n  "b"\n\n# a comment\nother-rule ::= root', ["a", "b"], ["ab", ""]),
    ],
)
def test_a_grammar_accepts_what_it_describes(grammar: str, accepted: list[str], refused: list[str]) -> None:
    made = constraint_of(grammar=grammar)
    assert [text for text in accepted if not accepts(made, text)] == []
    assert [text for text in refused if accepts(made, text)] == []


Written = tuple[str, str]
"""One expression in GBNF and as a regex of Python's."""

_atoms: st.SearchStrategy[Written] = st.one_of(
    st.text("ab.", max_size=2).map(lambda text: (f'"{text}"', re.escape(text))),
    st.sampled_from([("[ab]", "[ab]"), ("[^a]", "[^a]"), ("[a-b.]", "[a-b.]")]),
)


def _larger(inner: st.SearchStrategy[Written]) -> st.SearchStrategy[Written]:
    def repeated(node: Written, times: str) -> Written:
        return f"({node[0]}){times}", f"(?:{node[1]}){times}"

    def sequence(nodes: list[Written]) -> Written:
        return " ".join(f"({node[0]})" for node in nodes), "".join(f"(?:{node[1]})" for node in nodes)

    def either(nodes: list[Written]) -> Written:
        return " | ".join(node[0] for node in nodes), "|".join(node[1] for node in nodes)

    several = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        st.builds(repeated, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])),
        several.map(sequence),
        several.map(either),
    )


@given(st.recursive(_atoms, _larger, max_leaves=6), st.lists(st.text("ab.c", max_size=5), min_size=4, max_size=8))
def test_a_grammar_without_recursion_is_the_regex_that_it_looks_like(written: Written, texts: list[str]) -> None:
    grammar, regex = written
    made = constraint_of(grammar=f"root ::= {grammar}")
    for text in texts:
        assert accepts(made, text) == (re.fullmatch(regex, text) is not None), text

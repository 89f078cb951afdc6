"""From schemas, regexes, choices, grammars and tags to what their outputs may be, and what is refused by name."""

import json
import re

import jsonschema
import pytest
from constrained_text import accepts, constraint_of, random_output
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.errors import BadRequest, Unsupported
from ostro.grammar.limits import MAX_DEPTH

SCHEMAS: list[object] = [
    True,
    {},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"enum": ["red", 1, None, {"a": []}]},
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "integer", "multipleOf": 7}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}, {"type": "null"}]},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "$ref": "#/$defs/tree"},
    {"type": "array", "items": {}, "uniqueItems": False},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "object", "properties": {"x-guidance": {"type": "null"}}, "required": ["x-guidance"]},
]
INSTANCES: list[object] = [
    *(None, True, 0, 7, -14, 1.5, "", "aa", "abab", "aaaaaa", "red", [], [1], [1, 2, 3, 4], [[]], [[[], []]]),
    *({}, {"a": 1}, {"a": "1"}, {"a": True}, {"a": []}, {"k": 1}, {"k": 2}, {"x-guidance": None}, {"x-guidance": 1}),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_a_schema_accepts_the_instances_that_validate_and_no_others(schema: object) -> None:
    made = constraint_of(json_schema=json.dumps(schema))
    # A number that only says integer by its value is an instance, and not one that is written.
    for instance in INSTANCES:
        valid = jsonschema.Draft202012Validator(schema).is_valid(instance)
        assert accepts(made, json.dumps(instance)) == valid, instance


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32), jump_forward=st.booleans(), strict=st.booleans())
def test_whatever_is_written_under_a_schema_validates(
    schema: object, seed: int, jump_forward: bool, strict: bool
) -> None:
    made = constraint_of(json_schema=json.dumps(schema), jump_forward=jump_forward, strict=strict)
    output = random_output(made, seed, most=80)
    if output is not None:
        jsonschema.validate(json.loads(output), schema)


COMPACT, PRETTY = '{"a":[1,2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}'
SPACED, RUN = '{"a": [1, 2]}', '{"a":  [1, 2]}'


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({}, {COMPACT, PRETTY, SPACED}),
        ({"jump_forward": True}, {SPACED}),
        ({"whitespace_pattern": ""}, {COMPACT}),
        ({"whitespace_pattern": " {0,2}"}, {COMPACT, SPACED, RUN}),
    ],
)
def test_whitespace_is_bounded_in_any_object(fields: dict[str, object], accepted: set[str]) -> None:
    made = constraint_of(json_object=True, **fields)
    assert {text for text in (COMPACT, PRETTY, SPACED, RUN) if accepts(made, text)} == accepted
    assert not accepts(made, "[]")
    assert not accepts(made, "{\n\n\n}")


@given(seed=st.integers(0, 2**32))
def test_no_output_has_a_long_run_of_whitespace_outside_strings(seed: int) -> None:
    output = random_output(constraint_of(json_object=True), seed)
    if output is not None:
        assert not re.search(r"[ \t\n\r]{30,}", re.sub(r'"(\\.|[^"\\])*"', '""', output))


def test_a_users_options_for_the_library_are_ignored() -> None:
    hostile = {
        "type": "object",
        "x-guidance": {"whitespace_flexible": True, "lenient": True, "whitespace_pattern": " *"},
    }
    made = constraint_of(json_schema=json.dumps(hostile))
    assert not accepts(made, '{     "a": 1}')
    within = {"type": "object", "properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}}, **hostile}
    with pytest.raises(Unsupported):
        constraint_of(json_schema=json.dumps(within))


def nested(keywords: dict[str, object]) -> str:
    return json.dumps({"type": "object", "properties": {"a/b": {"items": keywords}}})


@pytest.mark.parametrize(
    ("keywords", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]}, "oneOf"),
        ({"type": "string", "format": "regex"}, "format"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"contains": {"type": "string"}}, "contains"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"patternProperties": {"^a": {"type": "null"}, "^ab": {"type": "string"}}}, "patternProperties"),
        ({"minProperties": 1, "properties": {"a": {}}}, "minProperties"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_path_and_ignored_if_not_strict(
    keywords: dict[str, object], keyword: str
) -> None:
    where = f"#/properties/a~1b/items/{keyword}"
    with pytest.raises(Unsupported, match=re.escape(f"{keyword} at {where} is not supported")) as refusal:
        constraint_of(json_schema=nested(keywords))
    assert refusal.value.param == "json_schema"
    assert "strict" in refusal.value.message
    made = constraint_of(json_schema=nested(keywords), strict=False)
    assert accepts(made, '{"a/b": []}')
    assert not accepts(made, "[]")


@pytest.mark.parametrize(
    ("keywords", "keyword", "valid"),
    [
        ({"enum": [1234567890123456789]}, "enum", "1234567890123456789"),
        ({"const": 9007199254740993}, "const", "9007199254740993"),
        ({"enum": ["a", {"b": [18446744073709551615]}]}, "enum", '{"b": [18446744073709551615]}'),
        ({"type": "integer", "minimum": 10**30, "maximum": 10**31}, "minimum", str(2 * 10**30)),
        ({"type": "integer", "minimum": -(2**63)}, "minimum", "-5"),
        ({"type": "number", "maximum": 1e20}, "maximum", "1e19"),
        ({"type": "number", "minimum": 1e-100}, "minimum", "0.5"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}, "exclusiveMinimum", "0.0000000001"),
        ({"minimum": -12.5, "exclusiveMaximum": -12}, "exclusiveMaximum", "-12.25"),
        ({"type": "object", "minProperties": 2}, "minProperties", '{"a": 1, "b": 2}'),
    ],
)
def test_what_would_be_enforced_wrongly_is_refused_or_left_out(
    keywords: dict[str, object], keyword: str, valid: str
) -> None:
    """The first wrote 1234567890123456768, the last accepted the same property twice."""
    with pytest.raises(Unsupported, match=re.escape(f"{keyword} at #/properties/a~1b/items/{keyword} is not supp")):
        constraint_of(json_schema=nested(keywords))
    made = constraint_of(json_schema=nested(keywords), strict=False)
    assert accepts(made, f'{{"a/b": [{valid}]}}')


TAGGED = {
    "$defs": {
        "A": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
        "B": {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
    },
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "discriminator": {"propertyName": "kind"},
}


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"oneOf": [{"const": 1}, {"const": 2}]}, "2"),
        ({"oneOf": [{"const": 1}, {"const": True}]}, "true"),
        ({"oneOf": [{"enum": [1, "a"]}, {"type": "null"}, {"type": "boolean"}]}, '"a"'),
        (TAGGED, '{"kind": "c"}'),
        ({"properties": {"a": {"oneOf": [{"const": 1}, {"type": "object"}]}}}, '{"a": 1}'),
    ],
)
def test_one_of_branches_that_exclude_each_other_is_any_of_them(schema: object, valid: str) -> None:
    assert accepts(constraint_of(json_schema=json.dumps(schema)), valid)


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1}, {"enum": [1.0, 2]}],
        [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 5}],
        [
            {"properties": {"k": {"const": 1}}, "required": ["k"]},
            {"properties": {"k": {"const": 2}}, "required": ["k"]},
        ],
        [{"type": "object", "properties": {"k": {"const": each}}} for each in (1, 2)],
        [{"const": {"a": 1}}, {"const": {"a": 1.0}}],
    ],
    ids=json.dumps,
)
def test_one_of_branches_that_may_both_fit_is_refused(branches: object) -> None:
    with pytest.raises(Unsupported, match="oneOf"):
        constraint_of(json_schema=json.dumps({"oneOf": branches}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    ],
    ids=json.dumps,
)
def test_a_property_cannot_come_again_by_another_spelling_of_its_name(schema: object) -> None:
    made = constraint_of(json_schema=json.dumps(schema))
    assert accepts(made, '{"a": 1, "b\\n": "\\"é\\n"}')
    assert not accepts(made, '{"a": 1, "\\u0061": "x"}')


def test_a_control_character_that_a_schema_names_can_be_written() -> None:
    schema = {"type": "object", "properties": {"a": {"const": "\x01"}}, "required": ["a"]}
    assert accepts(constraint_of(json_schema=json.dumps(schema)), r'{"a": "\u0001"}')


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"const": 2**53}, [2**53], [2**53 - 1]),
        ({"type": "integer", "maximum": 2**63 - 1}, [2**63 - 1], [2**63]),
        ({"type": "integer", "exclusiveMinimum": -(2**53)}, [1 - 2**53], [-(2**53)]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 0.5}, [0, 0.25], [0.5]),
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ],
)
def test_numbers_that_floats_have_are_exact(schema: object, accepted: list[object], refused: list[object]) -> None:
    made = constraint_of(json_schema=json.dumps(schema))
    assert [accepts(made, json.dumps(each)) for each in accepted] == [True] * len(accepted)
    assert not any(accepts(made, json.dumps(each)) for each in refused)


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"dependencies": {}},
        {"propertyNames": True},
        {"unevaluatedProperties": True},
        {"if": {"type": "string"}},
        {"then": {"type": "string"}},
        {"not": False},
    ],
    ids=json.dumps,
)
def test_keywords_that_say_nothing_are_no_reason_to_refuse(schema: dict[str, object]) -> None:
    assert accepts(constraint_of(json_schema=json.dumps({"type": "object"} | schema)), '{"a": 1}')


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "foo"}, "#/type: Invalid type: foo"),
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type"),
        ({"properties": []}, "properties must be an object"),
        ({"minimum": "3"}, "minimum"),
        ({"$ref": "#"}, "no text satisfies it"),
        (False, "no JSON satisfies it"),
    ],
)
def test_a_schema_that_is_wrong_is_refused_strict_or_not(schema: object, named: str, strict: bool) -> None:
    with pytest.raises(BadRequest, match=re.escape(named)) as refusal:
        constraint_of(json_schema=json.dumps(schema), strict=strict)
    assert refusal.value.param == "json_schema"


def test_a_reference_that_leads_nowhere_is_a_mistake_unless_it_may_be_ignored() -> None:
    schema = json.dumps({"properties": {"a": {"$ref": "#/$defs/nope"}}})
    with pytest.raises(BadRequest, match=re.escape("#/properties/a/$ref")):
        constraint_of(json_schema=schema)
    assert accepts(constraint_of(json_schema=schema, strict=False), '{"a": 1}')


def deep(levels: int) -> object:
    return {"items": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"items": {"type": "integer", "multipleOf": 99_991}}, "multipleOf at #/items/multipleOf"),
        ({"type": "number", "multipleOf": 0.99991}, "multipleOf"),
        ({"type": "number", "multipleOf": 1e300}, "multipleOf"),
        ({"patternProperties": {f"^{n}$": {} for n in range(65)}}, "patternProperties at #/patternProperties"),
        ({"patternProperties": {"a" * 1025: {}}}, "patternProperties"),
        ({"properties": {f"p{n}": {} for n in range(501)}}, "properties at #/properties"),
        ({"enum": list(range(20_001))}, "enum at #/enum"),
        ({"pattern": "a" * 1025}, "pattern at #/pattern"),
        (deep(MAX_DEPTH + 1), "levels deep"),
        ({"const": json.loads("[" * 80 + "]" * 80)}, "levels deep"),
    ],
)
def test_structure_too_slow_to_compile_is_refused_beforehand(schema: object, named: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(named)) as refusal:
        constraint_of(json_schema=json.dumps(schema))
    assert refusal.value.param == "json_schema"


def test_required_properties_are_as_many_as_one_likes() -> None:
    names = [f"p{number}" for number in range(600)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names}
    constraint_of(json_schema=json.dumps(schema))


@pytest.mark.parametrize(
    ("regex", "text", "match"),
    [
        ("[a-z]+", "abc", True),
        ("[a-z]+", "abc1", False),
        ("^a|b$", "b", True),
        (r"\d{3}-\d{4}", "555-1234", True),
        ("a/b", "a/b", True),
        (r"a\/b", "a/b", True),
        ("[/]", "/", True),
        ("a\nb", "a\nb", True),
        ("(?i)yes", "YES", True),
        ("é+", "éé", True),
        ("x.y", "x\ny", False),
        ('"(a|b)"', '"a"', True),
    ],
)
def test_a_regex_matches_as_a_whole(regex: str, text: str, match: bool) -> None:
    assert accepts(constraint_of(regex=regex), text) == match


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "["}, "unclosed"),
        ({"regex": "(abc){10001}"}, "repeats {10001} times"),
        ({"json_schema": '{"items": {"pattern": "(abc){10001}"}}'}, "repeats {10001} times at #/items/pattern"),
        ({"json_schema": '{"patternProperties": {"a{10001}": {}}}'}, "repeats {10001} times at #/patternProperties"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": 'foo: "a"'}, "start"),
        ({"grammar": '{"grammars": []}'}, "Lark's notation"),
        ({"grammar": 'start[max_tokens=5]: "a"'}, "sets max_tokens for a rule"),
        ({"grammar": 'root ::= "a" x'}, "there is no rule x (line 1)"),
        ({"grammar": 'x ::= "a"'}, "has no rule root"),
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "two rules root (line 2)"),
        ({"grammar": 'root ::= ("a"'}, "expected )"),
        ({"grammar": 'root ::= "a'}, "expected a quote"),
        ({"grammar": "root ::= [a"}, "expected ]"),
        ({"grammar": "root ::= []"}, "is empty"),
        ({"grammar": "root ::= [b-a]"}, "wrong way round"),
        ({"grammar": r'root ::= "\q"'}, "is not an escape"),
        ({"grammar": 'root ::= "a"{3,1}'}, "from the lower to the higher"),
        ({"grammar": "root ::= <[5]>"}, "not supported"),
        ({"grammar": "root ::= " + "(" * 100 + '"a"' + ")" * 100}, "nested"),
        ({"structural_tag": "{}"}, "needs structures"),
        ({"structural_tag": '{"type": "structural_tag", "format": {}}'}, "with a format is not supported"),
        ({"structural_tag": '{"triggers": ["<"], "structures": [{"begin": "x", "end": ""}]}'}, "none of the triggers"),
        ({"structural_tag": '{"triggers": ["<"], "structures": [{"begin": "<"}]}'}, "needs the texts begin and end"),
        (
            {"structural_tag": '{"triggers": ["<"], "structures": [{"begin": "<", "end": "", "schema": {"not": {}}}]}'},
            "not at structures[0].schema#/not",
        ),
    ],
)
def test_malformed_or_unsupported_field_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(named)) as refusal:
        constraint_of(**fields)
    assert refusal.value.param == next(iter(fields))
    assert "\n" not in refusal.value.message


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), st.text(max_size=6))
def test_a_choice_is_one_of_its_texts_whatever_characters_they_have(choices: list[str], other: str) -> None:
    made = constraint_of(choice=choices)
    for text in {*choices, other}:
        assert accepts(made, text) == (text in choices)


TAGS = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("", True),
        ("Free text <f only", True),
        ("I call <f=one>12</f>.", True),
        ("<f=two>true</f> and <f=one>1</f>", True),
        ("<f=two>1</f>", False),
        ("<f=three>1</f>", False),
        ("<f=one>1", False),
    ],
)
def test_structural_tags_bind_what_follows_a_trigger_and_nothing_else(text: str, accepted: bool) -> None:
    assert accepts(constraint_of(structural_tag=json.dumps(TAGS)), text) == accepted


def test_a_trigger_that_is_a_special_token_is_that_token() -> None:
    tags = {"triggers": ["<|im_start|>"], "structures": [{"begin": "<|im_start|>x", "end": "<|im_end|>"}]}
    grammar = constraint_of(structural_tag=json.dumps(tags)).grammar
    assert re.search(r'tag0: TEXT <\[\d+\]> body0\nbody0: "x" %json .* <\[\d+\]>', grammar)


LARK = """
start: "SELECT " COLUMN (", " COLUMN)* " FROM " TABLE
COLUMN: /[a-z]+/
TABLE: "t" /[0-9]/
"""


def test_a_grammar_in_larks_notation() -> None:
    made = constraint_of(grammar=LARK)
    assert made.is_users
    assert accepts(made, "SELECT a, bc FROM t1")
    assert not accepts(made, "SELECT a, FROM t1")

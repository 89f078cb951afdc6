import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.structured import KINDS, MAX_CHOICES, MAX_GRAMMAR_CHARACTERS, StructuredOutput

EXAMPLES: dict[str, object] = {
    "json_schema": '{"type": "object"}',
    "json_object": True,
    "regex": "[a-z]+",
    "choice": ("yes", "no"),
    "grammar": 'start: "a"',
    "structural_tag": '{"structures": [], "triggers": []}',
}


def structured(**fields: object) -> StructuredOutput:
    """Built from values of any type, as at the edge."""
    return StructuredOutput(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_the_kinds_is_enough_and_is_told_by_its_name(kind: str) -> None:
    made = structured(**{kind: EXAMPLES[kind]})
    assert made.kind == kind
    assert hash(made) == hash(structured(**{kind: EXAMPLES[kind]}))


def test_exactly_one_kind_is_required() -> None:
    with pytest.raises(BadRequest, match=r"Give exactly one of json_schema.*got none of them\.") as refusal:
        structured()
    assert refusal.value.param == "structured"
    with pytest.raises(BadRequest, match="got regex and choice"):
        structured(regex="a", choice=["a"])


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", "[" * 100_000),
        ("json_schema", ""),
        ("json_schema", {"type": "object"}),
        ("json_schema", '"' + "x" * MAX_GRAMMAR_CHARACTERS + '"'),
        ("json_object", 1),
        ("regex", 5),
        ("regex", "\ud800"),
        ("choice", "yes"),
        ("choice", [""]),
        ("choice", [1]),
        ("choice", ["\ud800"]),
        ("choice", ["a"] * (MAX_CHOICES + 1)),
        ("choice", ["a" * MAX_GRAMMAR_CHARACTERS, "b"]),
        ("grammar", b"start: a"),
        ("structural_tag", "true"),
    ],
)
def test_a_field_of_the_wrong_form_or_size_is_refused_by_its_name(name: str, bad: object) -> None:
    with pytest.raises(BadRequest) as refusal:
        structured(**{name: bad})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"choice": ["a"], "strict": False}, "strict"),
        ({"json_object": True, "strict": False}, "strict"),
        ({"regex": "a", "jump_forward": 1}, "jump_forward"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        structured(**fields)
    assert refusal.value.param == param


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_a_schema_from_python_is_its_json_text(value: object) -> None:
    text = StructuredOutput.from_schema({"const": value}, strict=False).json_schema
    assert text is not None
    assert structured(json_schema=text, strict=False) == StructuredOutput.from_schema({"const": value}, strict=False)


def test_a_schema_from_python_that_is_not_json_is_refused() -> None:
    with pytest.raises(BadRequest) as refusal:
        StructuredOutput.from_schema({"const": object()})
    assert refusal.value.param == "json_schema"


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_sampling_parameters_that_contradict_a_structure_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(structured=StructuredOutput(regex="a"), **other)  # type: ignore[arg-type]
    assert refusal.value.param == next(iter(other))


def test_sampling_parameters_keep_the_structure_and_leave_it_out_of_what_the_engine_gets() -> None:
    asked = SamplingParams(structured=StructuredOutput(regex="a"), temperature=0.5)
    assert asked.with_changes(top_p=0.5).structured == asked.structured
    assert asked.without_texts() == SamplingParams(temperature=0.5)
    with pytest.raises(BadRequest, match="must be a StructuredOutput"):
        SamplingParams(structured={"regex": "a"})  # type: ignore[arg-type]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.measure.compare.agreement import agreement, common_prefix, summary
from ostro.measure.compare.answers import Answer, Failure, Outcome, Token

FAILED = Failure("no", 1.0)
texts = st.text(alphabet="abc", max_size=8)


def answer(text: str, *tokens: Token) -> Answer:
    return Answer(text=text, seconds=1.0, tokens=tokens)


answers = st.builds(
    lambda text, values: answer(text, *(Token(c, logprob=v) for c, v in zip(text, values, strict=False))),
    texts,
    st.lists(st.floats(-20, 0), max_size=8),
)


@given(texts, texts)
def test_common_prefix_is_common_and_no_longer_one_is(a: str, b: str) -> None:
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert a[: length + 1] != b[: length + 1] or length == len(a) == len(b)


@given(texts, texts, texts)
def test_common_prefix_length_counts(start: str, a: str, b: str) -> None:
    assert common_prefix(start + a, start + b) == len(start) + common_prefix(a, b)


@given(answers, answers)
def test_agreement_is_the_same_both_ways(a: Answer, b: Answer) -> None:
    assert agreement(a, b) == agreement(b, a)


@given(answers)
def test_an_answer_agrees_with_itself(a: Answer) -> None:
    found = agreement(a, a)
    assert found is not None
    assert (found.exact, found.prefix_chars) == (True, len(a.text))
    assert found.prefix_tokens == (len(a.tokens) or None)
    assert found.divergence is None or found.divergence.max == 0


@given(st.lists(st.tuples(answers | st.just(FAILED), answers | st.just(FAILED)), min_size=1, max_size=6))
def test_a_summary_adds_up(pairs: list[tuple[Outcome, Outcome]]) -> None:
    found = summary(pairs)
    each = [one for a, b in pairs if (one := agreement(a, b)) is not None]
    assert (found.prompts, found.compared) == (len(pairs), len(each))
    assert found.exact == sum(one.exact for one in each)
    assert 0 <= found.exact_share <= 1
    assert found.prefix_share is None or 0 <= found.prefix_share <= 1
    if found.divergence is not None:
        assert found.divergence.max == max(one.divergence.max for one in each if one.divergence)
        assert found.divergence.mean <= found.divergence.max * (1 + 1e-9)


def test_divergence_is_measured_on_the_common_prefix_alone() -> None:
    a = answer("abX", Token("a", logprob=-1.0), Token("b", logprob=-2.0), Token("X", logprob=-3.0))
    b = answer("abY", Token("a", logprob=-1.5), Token("b", logprob=-2.0), Token("Y", logprob=-9.0))
    found = agreement(a, b)
    assert found is not None
    assert (found.exact, found.prefix_chars, found.prefix_tokens) == (False, 2, 2)
    assert found.divergence is not None
    assert (found.divergence.mean, found.divergence.max, found.divergence.num_tokens) == (0.25, 0.5, 2)


def test_overall_divergence_weighs_tokens_not_prompts() -> None:
    one = answer("a", Token("a", logprob=0.0)), answer("a", Token("a", logprob=-1.0))
    three = (
        answer("aaa", *[Token("a", logprob=0.0)] * 3),
        answer("aaa", *[Token("a", logprob=-3.0)] * 3),
    )
    divergence = summary([one, three]).divergence
    assert divergence is not None
    assert (divergence.mean, divergence.max, divergence.num_tokens) == (2.5, 3.0, 4)


def test_ids_decide_where_both_sides_report_them() -> None:
    a, b = answer("x", Token("x", id=7)), answer("x", Token("x", id=8))
    found = agreement(a, b)
    assert found is not None
    assert (found.exact, found.prefix_tokens) == (True, 0)
    by_name = agreement(a, answer("x", Token("x")))
    assert by_name is not None
    assert by_name.prefix_tokens == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("bytes:\\xf0\\x9f", "bytes:\\xf0\\x9f", True),
        ("bytes:\\xf0\\x9f", "bytes:\\xe2", False),
        ("bytes:\\xf0\\x9f", "\ufffd", True),
        ("bytes:\\xf0\\x9f", "", True),
        (" the", "\ufffd", False),
        (" the", "bytes:\\xf0", False),
    ],
)
def test_partial_character_is_compared_as_far_as_it_is_given(one: str, other: str, *, same: bool) -> None:
    found = agreement(answer("x", Token(one)), answer("x", Token(other)))
    assert found is not None
    assert found.prefix_tokens == int(same)


def test_a_failure_is_never_agreement() -> None:
    assert agreement(FAILED, FAILED) is None
    found = summary([(answer("x"), answer("x")), (FAILED, answer("x")), (FAILED, FAILED)])
    assert (found.prompts, found.compared, found.exact) == (3, 1, 1)
    assert found.exact_share == pytest.approx(1 / 3)


def test_empty_answers_agree() -> None:
    found = summary([(answer(""), answer(""))])
    assert (found.exact, found.prefix_share, found.prefix_tokens, found.divergence) == (1, 1.0, None, None)

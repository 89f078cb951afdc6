import contextlib
import dataclasses
import math
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.errors import BadRequest
from ostro.sampling_params import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    PARAMETERS,
    SamplingOptions,
    SamplingParams,
)


def params(**fields: object) -> SamplingParams:
    """Built from values of any type, as at the edge."""
    return SamplingParams(**fields)  # type: ignore[arg-type]


def test_every_field_is_described_and_a_client_takes_each_by_its_name_in_requests() -> None:
    assert [*PARAMETERS, "unset"] == [each.name for each in dataclasses.fields(SamplingParams)]
    own = {"default_max_tokens", "logprobs", "structured"}
    names = {each.wire_name or name for name, each in PARAMETERS.items() if name not in own}
    assert SamplingOptions.__annotations__.keys() == names
    hints = get_type_hints(SamplingOptions)
    scalars = [each for each in dataclasses.fields(SamplingParams) if each.type in (int, int | None, float, bool)]
    assert {each.name: hints[each.name] for each in scalars if each.name in hints} == {
        each.name: each.type for each in scalars if each.name in hints
    }


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("temperature", "0 to 2; sampling temperature; 0 is greedy. None is the model's own default, otherwise 1"),
        ("n", "1 to 128; number of choices to generate; the prompt is computed once for all of them"),
        ("ignore_eos", "Keep generating past the end-of-sequence token"),
        ("seed", "The same seed gives the same tokens, whatever else is running; without one, a random seed is drawn"),
    ],
)
def test_a_description_has_the_range_the_meaning_and_what_holds_otherwise(name: str, description: str) -> None:
    assert PARAMETERS[name].description == description


def test_defaults_are_valid_and_do_not_truncate() -> None:
    defaults = SamplingParams()
    assert (defaults.n, defaults.max_tokens, defaults.temperature) == (1, 16, 1.0)
    assert (defaults.top_p, defaults.top_k, defaults.min_p) == (1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, MAX_CHOICES], [0, -1, MAX_CHOICES + 1, 1.0, True, "2", None]),
        ("max_tokens", [0, 1, 10**9, None], [-1, 1.5, True, "16"]),
        ("min_tokens", [0, 16], [-1, 17, 0.0, False, None]),
        ("temperature", [0, 0.0, 0.7, 2, 2.0], [-0.1, 2.01, math.nan, math.inf, "1", True, 10**400]),
        ("top_p", [0.001, 1, 1.0], [0, 0.0, -0.5, 1.01, math.nan, "1"]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.0, True, "40"]),
        ("min_p", [0, 0.5, 1.0], [-0.01, 1.01, math.nan]),
        ("top_n_sigma", [0, 1.0, 100], [-0.01, 100.1, math.nan]),
        ("repetition_penalty", [0.01, 1, 10.0], [0, 0.0, 1e-39, 0.009, -1, 10.1, math.nan]),
        ("presence_penalty", [-2, 0.5, 2.0], [-2.1, 2.1, math.nan, None]),
        ("frequency_penalty", [-2, 0.5, 2.0], [-2.1, 2.1, math.nan, None]),
        ("seed", [None, 0, -1, MAX_SEED, -MAX_SEED - 1], [MAX_SEED + 1, -MAX_SEED - 2, 1.0, True, "1"]),
        ("logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, 1.0, True]),
        ("prompt_logprobs", [None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, 1.0, True]),
        ("stop", [(), None, "end", ["a", "b"], ["a"] * MAX_STOPS], ["", [""], [1], ["a"] * (MAX_STOPS + 1), 5, 0]),
        ("bad_words", [(), None, "no", ["a", "b"], ["a"] * MAX_BAD_WORDS], [[""], [1], ["a"] * (MAX_BAD_WORDS + 1), 5]),
        ("ignore_eos", [True, False], ["false", 0, 1, None]),
        ("skip_special_tokens", [True, False], ["false", 0, 1, None]),
        ("include_stop_in_output", [True, False], ["false", 0, 1, None]),
        (
            "stop_token_ids",
            [(), None, [0, 7], [1] * MAX_STOP_TOKEN_IDS],
            [[-1], [1.0], [True], ["1"], [1] * (MAX_STOP_TOKEN_IDS + 1), 5, 0, "12"],
        ),
        (
            "logit_bias",
            [{}, None, {0: -100, 7: 100.0}, dict.fromkeys(range(MAX_LOGIT_BIAS), 1)],
            [
                {-1: 1.0},
                {1: 100.5},
                {1: math.nan},
                {"1": 1.0},
                {1: None},
                dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
                [1, 2],
                5,
                0,
            ],
        ),
    ],
)
def test_field_is_taken_within_its_range_and_refused_by_name_outside_it(
    name: str, good: list[object], bad: list[object]
) -> None:
    for value in good:
        params(**{name: value})
    for value in bad:
        with pytest.raises(BadRequest, match=rf"^{name} .*\.$") as refusal:
            params(**{name: value})
        assert refusal.value.param == name


def test_top_k_of_minus_one_keeps_all_tokens() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_lone_stop_text_is_one_stop_and_lists_become_tuples() -> None:
    made = params(stop="end", bad_words=["a", "b"], stop_token_ids=[1, 2])
    assert (made.stop, made.bad_words, made.stop_token_ids) == (("end",), ("a", "b"), (1, 2))


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=8, max_tokens=8)
    SamplingParams(min_tokens=1000, max_tokens=None)
    with pytest.raises(BadRequest, match="must not exceed max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_temperature_of_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_params_are_frozen_and_keep_no_hold_of_what_they_were_made_from() -> None:
    bias = {1: 2.0}
    made = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert made.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.n = 2  # type: ignore[misc]
    assert hash(made) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_copy_with_changes_is_validated() -> None:
    made = SamplingParams(n=2, stop=("a",))
    assert made.with_changes(n=3) == SamplingParams(n=3, stop=("a",))
    with pytest.raises(BadRequest, match="n must be"):
        made.with_changes(n=0)


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())


@given(st.sampled_from([field.name for field in dataclasses.fields(SamplingParams) if field.init]), anything)
def test_no_value_of_a_field_raises_anything_but_a_bad_request(name: str, value: object) -> None:
    """A number where a list belongs, and an integer beyond all floats, once raised errors that a server answers 500."""
    with contextlib.suppress(BadRequest):
        params(**{name: value})

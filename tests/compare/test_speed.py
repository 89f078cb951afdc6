import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import FAILED, answer

from ostro.measure.compare.answers import Answer, Recorder, Token
from ostro.measure.compare.speed import percentiles, speed
from ostro.measure.report.numbers import percentile

values = st.lists(st.floats(0, 1e6), min_size=2, max_size=50)


@given(values)
def test_percentiles_are_ordered_and_within_the_values(some: list[float]) -> None:
    found = percentiles(some)
    assert found is not None
    assert min(some) <= found.p50 <= found.p90 <= found.p99 <= max(some)
    assert found.p50 == pytest.approx(statistics.median(some))


@given(values)
def test_percentile_is_that_of_the_standard_library(some: list[float]) -> None:
    expected = statistics.quantiles(some, n=100, method="inclusive")
    assert percentile(sorted(some), 0.9) == pytest.approx(expected[89])


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([None, None]) is None


def test_speed_counts_answers_only() -> None:
    found = speed([answer("a", seconds=1.0), answer("b", seconds=3.0), FAILED], 4.0)
    assert (found.answered, found.failed, found.num_tokens) == (2, 1, 6)
    assert (found.tokens_per_second, found.requests_per_second) == (1.5, 0.5)
    assert found.latency is not None
    assert found.latency.p50 == 2.0
    assert found.ttft is not None
    assert found.ttft.p50 == 0.5
    # (3/4 - 1/4) of the time for two tokens after the first.
    assert found.token_seconds is not None
    assert found.token_seconds.p50 == 0.5


def test_tokens_are_the_sides_own_count_else_those_reported_else_the_parts() -> None:
    parts = (0.1, 0.2)
    assert Answer(text="ab", seconds=1, arrivals=parts, tokens=(Token("a"),) * 3, counted=5).num_tokens == 5
    assert Answer(text="ab", seconds=1, arrivals=parts, tokens=(Token("a"),) * 3).num_tokens == 3
    assert Answer(text="ab", seconds=1, arrivals=parts).num_tokens == 2


def test_one_token_has_no_time_between_tokens() -> None:
    assert Answer(text="a", seconds=1, arrivals=(0.1,)).token_seconds is None
    assert Answer(text="", seconds=1).ttft is None


def test_a_recorder_joins_the_halves_of_a_character() -> None:
    recorder = Recorder()
    for part in ("\ud83d", "\ude00", "", "\ud83d"):
        recorder.add(part)
    found = recorder.answer()
    assert found.text == "😀\ufffd"
    assert len(found.arrivals) == 3
    assert list(found.arrivals) == sorted(found.arrivals)

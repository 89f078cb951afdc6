import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.errors import BadRequest
from ostro.measure.bench.figures import Cost, Slo, Spread, figures
from ostro.measure.bench.outcomes import Outcome


def made(
    start: float, *arrivals: float, e2e: float | None = None, tokens: int | None = None, error: str | None = None
) -> Outcome:
    return Outcome(
        index=0,
        start=start,
        e2e=arrivals[-1] if e2e is None else e2e,
        arrivals=list(arrivals),
        input_tokens=10,
        output_tokens=len(arrivals) if tokens is None else tokens,
        max_tokens=4,
        error=error,
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_spread_is_numpys(values: list[float]) -> None:
    found = Spread.of(values)
    assert found is not None
    expected = [np.mean(values), *np.percentile(values, [50, 95, 99]), max(values)]
    assert [found.mean, found.p50, found.p95, found.p99, found.max] == pytest.approx(expected)
    assert found.count == len(values)


def test_nothing_has_no_spread() -> None:
    assert Spread.of([None]) is None


def test_throughput_is_over_the_time_from_the_first_request_to_the_last_answer() -> None:
    found = figures([made(1.0, 0.5, 1.0), made(2.0, 1.0, 2.0, 3.0), made(0.5, e2e=0.1, error="HTTP 503")])
    assert found.seconds == 4.5
    assert (found.requests, found.succeeded, found.failed) == (3, 2, 1)
    assert found.requests_per_second == pytest.approx(2 / 4.5)
    assert (found.output_tokens, found.input_tokens) == (5, 20)
    assert found.output_tokens_per_second == pytest.approx(5 / 4.5)
    assert found.total_tokens_per_second == pytest.approx(25 / 4.5)


def test_failed_requests_are_in_no_latency() -> None:
    found = figures([made(0, 1.0, 2.0), made(0, 50.0, 90.0, error="cut off")])
    assert found.ttft is not None
    assert found.itl is not None
    assert found.e2e is not None
    assert (found.ttft.max, found.itl.max, found.e2e.max) == (1.0, 1.0, 2.0)
    assert found.output_tokens == 2


def test_errors_are_counted_by_kind_most_frequent_first() -> None:
    kinds = ["timeout", "HTTP 429 queue_full", "HTTP 429 queue_full", "connection"]
    found = figures([made(0, e2e=1.0, error=kind) for kind in kinds])
    assert list(found.errors.items()) == [("HTTP 429 queue_full", 2), ("timeout", 1), ("connection", 1)]
    assert (found.ttft, found.e2e, found.requests_per_second) == (None, None, 0.0)


def test_gaps_of_all_answers_are_one_spread_and_each_answer_has_one_time_per_token() -> None:
    found = figures([made(0, 1.0, 2.0, 4.0, tokens=5), made(0, 1.0, 1.5)])
    assert found.itl is not None
    assert found.tpot is not None
    assert (found.itl.count, found.itl.max) == (3, 2.0)
    assert (found.tpot.count, found.tpot.max) == (2, 0.75)
    assert found.tokens_per_event == 7 / 5


def test_early_ends_and_counting_by_events_are_reported() -> None:
    outcomes = [made(0, 1.0, tokens=4), made(0, 1.0, tokens=3)]
    found = figures([*outcomes, Outcome(index=0, start=0, e2e=1, arrivals=[1.0], counted_by="events", max_tokens=4)])
    assert (found.ended_early, found.counted_by_events) == (1, 1)
    # One of them had none, so the sum would mislead.
    assert found.input_tokens is None


def test_figures_of_no_requests_are_zero() -> None:
    found = figures([], slo=Slo.parsed("ttft=1s"))
    assert (found.requests, found.seconds, found.output_tokens_per_second) == (0, 0.0, 0.0)
    assert found.goodput is not None
    assert found.goodput.share == 0.0


def test_goodput_counts_what_keeps_every_limit() -> None:
    slo = Slo.parsed("ttft=500ms, itl=50ms,e2e=1s")
    good = made(0, 0.5, 0.54, 0.6)
    outcomes = [
        good,
        made(0, 0.51, 0.55),  # first token too late
        made(0, 0.1, 0.3),  # gaps too long
        made(0, 0.5, 0.55, e2e=1.01),  # whole answer too late
        made(0, 0.2, 0.22, error="cut off"),
        made(0, 0.4),  # one event has no gap to be too long
        made(1.0, 0.4, e2e=1.0),
    ]
    found = figures(outcomes, slo=slo).goodput
    assert found is not None
    assert found.good == 3
    assert found.share == pytest.approx(3 / 7)
    assert found.requests_per_second == pytest.approx(3 / 2.0)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=5m", "speed=5s", "ttft=-1s", "ttft=0ms", "e2e=infs", "itl=nanms"]
)
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="ttft, itl, tpot, e2e"):
        Slo.parsed(text)


def test_cost_is_that_of_the_time_that_the_load_took() -> None:
    outcomes = [made(0, 1.0, 2.0, tokens=500), made(1.0, 1.0, 9.0, tokens=1500)]
    found = figures(outcomes, cost_per_hour=3.6)
    assert found.cost is not None
    # Ten seconds of 0.1 cents each, for 2000 tokens out.
    assert found.cost.per_million_output_tokens == pytest.approx(5.0)
    assert found.input_tokens is not None
    assert found.cost.per_million_tokens == pytest.approx(0.01 / (2000 + found.input_tokens) * 1e6)


def test_cost_without_tokens_is_none() -> None:
    found = figures([made(0, e2e=1.0, error="HTTP 503")], cost_per_hour=1.0).cost
    assert found == Cost(per_hour=1.0, per_million_output_tokens=None, per_million_tokens=None)
    assert figures([]).cost is None

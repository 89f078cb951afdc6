"""Aggregates a level's outcomes: latency percentiles, throughput, goodput, errors. Pure functions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ostro.errors import BadRequest
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.report.numbers import percentile

LATENCIES = ("ttft", "itl", "tpot", "e2e")
_UNITS = {"ms": 1e-3, "s": 1.0}


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Ignores None; returns None if nothing is left."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        p50, p95, p99 = (percentile(known, share) for share in (0.5, 0.95, 0.99))
        return cls(mean=sum(known) / len(known), p50=p50, p95=p95, p99=p99, max=known[-1], count=len(known))


class Slo(msgspec.Struct, frozen=True):
    """A service level objective: a limit in seconds for some of a request's latencies."""

    limits: Mapping[str, float]

    @classmethod
    def parsed(cls, text: str) -> "Slo":
        """From `ttft=500ms,e2e=5s`."""
        limits = {}
        for clause in text.split(","):
            name, _, value = (part.strip() for part in clause.partition("="))
            unit = next((unit for unit in _UNITS if value.endswith(unit)), "")
            try:
                seconds = float(value.removesuffix(unit)) * _UNITS[unit]
            except (KeyError, ValueError):
                seconds = -1.0
            if name not in LATENCIES or not 0 < seconds < float("inf"):
                raise BadRequest(
                    f"--slo {clause!r} is not a limit. Write one of {', '.join(LATENCIES)} with a time in ms or s, "
                    "as in ttft=500ms,itl=50ms,e2e=5s.",
                    param="slo",
                )
            limits[name] = seconds
        return cls(limits)

    def kept_by(self, outcome: Outcome) -> bool:
        """Whether the request met all limits. A missing latency, as in a single-event answer, meets its own."""
        if outcome.error is not None:
            return False
        values = ((getattr(outcome, name), limit) for name, limit in self.limits.items())
        return all(value is None or value <= limit for value, limit in values)


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    good: int
    share: float
    """Share of good requests among all, including failed ones."""
    requests_per_second: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in the currency of the price; None if there were no such tokens."""

    per_hour: float
    """The price of everything that served the load."""
    per_million_output_tokens: float | None
    """Cost per million output tokens, as if only they were paid for."""
    per_million_tokens: float | None
    """Cost per million input and output tokens; also None if the server does not report input tokens."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    succeeded: int
    failed: int
    unfinished: int
    """Aborted because the run was stopped; not counted in any other figure."""
    errors: dict[str, int]
    """Failures by kind, most frequent first."""
    seconds: float
    """From the first request sent to the end of the last answer."""
    requests_per_second: float
    """Successful requests only."""
    output_tokens: int
    output_tokens_per_second: float
    input_tokens: int | None
    """None if the server does not report it."""
    total_tokens_per_second: float | None
    cached_share: float | None
    """Share of prompt tokens that were in the server's prefix cache; None if it does not report that."""
    tokens_per_event: float | None
    counted_by_events: int
    """Answers whose tokens the server did not count."""
    resent: int
    """Requests resent on a new connection because their kept-alive one was closed without an answer."""
    ended_early: int
    """Answers with fewer tokens than requested."""
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    late: Spread | None
    """How late an open loop's requests were sent."""
    goodput: Goodput | None
    cost: Cost | None = None


def figures(
    outcomes: Sequence[Outcome], *, unfinished: int = 0, slo: Slo | None = None, cost_per_hour: float | None = None
) -> Figures:
    good = [each for each in outcomes if each.error is None]
    seconds = _seconds(outcomes)
    output_tokens = sum(each.output_tokens for each in good)
    inputs = [each.input_tokens for each in good if each.input_tokens is not None]
    input_tokens = sum(inputs) if good and len(inputs) == len(good) else None
    cached = [each.cached_tokens for each in good if each.cached_tokens is not None]
    num_events = sum(len(each.arrivals) for each in good)

    def per_second(number: float) -> float:
        return number / seconds if seconds else 0.0

    kept = 0 if slo is None else sum(map(slo.kept_by, outcomes))
    return Figures(
        requests=len(outcomes),
        succeeded=len(good),
        failed=len(outcomes) - len(good),
        unfinished=unfinished,
        errors=dict(Counter(each.error for each in outcomes if each.error is not None).most_common()),
        seconds=seconds,
        requests_per_second=per_second(len(good)),
        output_tokens=output_tokens,
        output_tokens_per_second=per_second(output_tokens),
        input_tokens=input_tokens,
        total_tokens_per_second=None if input_tokens is None else per_second(input_tokens + output_tokens),
        cached_share=sum(cached) / input_tokens if cached and input_tokens else None,
        tokens_per_event=output_tokens / num_events if num_events else None,
        counted_by_events=sum(each.counted_by == "events" for each in good),
        resent=sum(each.resent for each in outcomes),
        ended_early=sum(each.output_tokens < each.max_tokens for each in good if each.counted_by == "usage"),
        ttft=Spread.of(each.ttft for each in good),
        itl=Spread.of(gap for each in good for gap in each.gaps),
        tpot=Spread.of(each.tpot for each in good),
        e2e=Spread.of(each.e2e for each in good),
        late=Spread.of(each.late for each in outcomes),
        goodput=None
        if slo is None
        else Goodput(good=kept, share=kept / len(outcomes) if outcomes else 0.0, requests_per_second=per_second(kept)),
        cost=None if cost_per_hour is None else _cost(cost_per_hour, seconds, output_tokens, input_tokens),
    )


def _cost(per_hour: float, seconds: float, output_tokens: int, input_tokens: int | None) -> Cost:
    paid = per_hour * seconds / 3600

    def per_million(tokens: int) -> float | None:
        return paid / tokens * 1e6 if tokens else None

    return Cost(
        per_hour=per_hour,
        per_million_output_tokens=per_million(output_tokens),
        per_million_tokens=None if input_tokens is None else per_million(input_tokens + output_tokens),
    )


def _seconds(outcomes: Sequence[Outcome]) -> float:
    if not outcomes:
        return 0.0
    return max(each.start + each.e2e for each in outcomes) - min(each.start for each in outcomes)

"""A side's speed: percentiles of request durations, and throughput. Pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostro.measure.compare.answers import Answer, Outcome
from ostro.measure.report.numbers import percentile


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    answered: int
    failed: int
    num_tokens: int
    seconds: float
    """Time from the first request to the last answer, without warm-up."""
    latency: Percentiles | None
    ttft: Percentiles | None
    """Time to the first token."""
    token_seconds: Percentiles | None
    """Time between tokens, averaged per request."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0


def speed(outcomes: Sequence[Outcome], seconds: float) -> Speed:
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    return Speed(
        answered=len(answers),
        failed=len(outcomes) - len(answers),
        num_tokens=sum(answer.num_tokens for answer in answers),
        seconds=seconds,
        latency=percentiles(answer.seconds for answer in answers),
        ttft=percentiles(answer.ttft for answer in answers),
        token_seconds=percentiles(answer.token_seconds for answer in answers),
    )


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Ignores None; returns None if nothing is left."""
    known = sorted(value for value in values if value is not None)
    return Percentiles(*(percentile(known, share) for share in (0.5, 0.9, 0.99))) if known else None

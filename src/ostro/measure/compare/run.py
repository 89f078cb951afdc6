"""Asks two sides the same prompts and pairs their answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from ostro.measure.compare.agreement import Agreement, Summary, agreement, summary
from ostro.measure.compare.answers import Answer, Outcome, Prompt
from ostro.measure.compare.sides import Side
from ostro.measure.compare.speed import Speed, speed
from ostro.sampling_params import SamplingParams

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SideRun:
    """One side's results."""

    reference: str
    model: str
    outcomes: tuple[Outcome, ...]
    """One per prompt, in order."""
    speed: Speed


@dataclass(frozen=True)
class Comparison:
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    concurrency: int
    a: SideRun
    b: SideRun

    @property
    def pairs(self) -> list[tuple[Outcome, Outcome]]:
        return list(zip(self.a.outcomes, self.b.outcomes, strict=True))

    @cached_property
    def agreements(self) -> list[Agreement | None]:
        return [agreement(a, b) for a, b in self.pairs]

    @cached_property
    def summary(self) -> Summary:
        return summary(self.pairs)

    @property
    def speed_ratio(self) -> float | None:
        """A's tokens per second divided by B's; None if either has none."""
        a, b = self.a.speed.tokens_per_second, self.b.speed.tokens_per_second
        return a / b if a and b else None

    @property
    def silent(self) -> list[str]:
        """Sides without a single answer."""
        return [name for name, side in (("A", self.a), ("B", self.b)) if not side.speed.answered]

    def as_json(self) -> dict[str, object]:
        """All results as plain data."""
        return {
            "settings": {
                "max_tokens": self.params.max_tokens,
                "temperature": self.params.temperature,
                "top_p": self.params.top_p,
                "seed": self.params.seed,
                "stop": list(self.params.stop),
                "logprobs": self.params.logprobs is not None,
                "concurrency": self.concurrency,
            },
            "agreement": asdict(self.summary) | {"exact_share": self.summary.exact_share},
            "speed_ratio": self.speed_ratio,
            "a": _side_json(self.a),
            "b": _side_json(self.b),
            "rows": [
                {
                    "prompt" if isinstance(prompt, str) else "messages": prompt,
                    "agreement": None if found is None else asdict(found),
                    "a": _outcome_json(a),
                    "b": _outcome_json(b),
                }
                for prompt, found, (a, b) in zip(self.prompts, self.agreements, self.pairs, strict=True)
            ],
        }


def compare(
    a: Side,
    b: Side,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    concurrency: int = 1,
    warmup: int = 1,
    progress: Progress = lambda side: None,
) -> Comparison:
    """Runs one side after the other, so that neither slows the other down. Calls `progress` for each answer.

    Check and prepare the sides first. Warm-up requests repeat the first prompts and are not counted.
    """
    runs = [_run(name, side, prompts, params, concurrency, warmup, progress) for name, side in (("A", a), ("B", b))]
    return Comparison(tuple(prompts), params, concurrency, *runs)


def _run(
    name: str,
    side: Side,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    concurrency: int,
    warmup: int,
    progress: Progress,
) -> SideRun:
    try:
        side.open()
        again = [prompts[number % len(prompts)] for number in range(warmup)]
        for _ in side.answers(again, params, concurrency=concurrency):
            pass
        outcomes: dict[int, Outcome] = {}
        began = time.perf_counter()
        for index, outcome in side.answers(prompts, params, concurrency=concurrency):
            outcomes[index] = outcome
            progress(name)
        seconds = time.perf_counter() - began
    finally:
        side.close()
    ordered = tuple(outcomes[index] for index in range(len(prompts)))
    return SideRun(side.reference, side.model, ordered, speed(ordered, seconds))


def _side_json(side: SideRun) -> dict[str, object]:
    return {
        "reference": side.reference,
        "model": side.model,
        **asdict(side.speed),
        "tokens_per_second": side.speed.tokens_per_second,
        "requests_per_second": side.speed.requests_per_second,
    }


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    if isinstance(outcome, Answer):
        derived = {"num_tokens": outcome.num_tokens, "ttft": outcome.ttft, "token_seconds": outcome.token_seconds}
        return asdict(outcome) | derived
    return asdict(outcome)

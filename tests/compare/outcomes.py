"""Comparisons made by hand, for tests of what is made of them."""

from collections.abc import Sequence

from ostro.measure.compare.answers import Answer, Failure, Outcome, Prompt, Token
from ostro.measure.compare.run import Comparison, SideRun
from ostro.measure.compare.speed import speed
from ostro.sampling_params import SamplingParams


def answer(text: str, *, seconds: float = 1.0, tokens: Sequence[Token] = ()) -> Answer:
    arrivals = tuple(seconds * part / 4 for part in (1, 2, 3))
    return Answer(
        text=text, seconds=seconds, arrivals=arrivals, tokens=tuple(tokens), counted=3, finish_reason="length"
    )


def comparison(
    pairs: Sequence[tuple[Outcome | str, Outcome | str]],
    *,
    prompts: Sequence[Prompt] | None = None,
    seconds: tuple[float, float] = (1.0, 2.0),
    params: SamplingParams | None = None,
    model: str = "m",
) -> Comparison:
    """A text stands for an answer that took as long as its side says."""
    runs = []
    for side, took in enumerate(seconds):
        given = [pair[side] for pair in pairs]
        outcomes = tuple(answer(each, seconds=took) if isinstance(each, str) else each for each in given)
        runs.append(SideRun(f"http://side-{'ab'[side]}", model, outcomes, speed(outcomes, took * len(outcomes))))
    asked = tuple(prompts if prompts is not None else [f"prompt {number}" for number in range(1, len(pairs) + 1)])
    return Comparison(asked, params or SamplingParams(max_tokens=3, temperature=0.0), 1, *runs)


FAILED = Failure("HTTP 500: out of order", 0.1)

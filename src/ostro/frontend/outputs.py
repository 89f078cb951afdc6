"""Results of requests, finished or running: text, ids, log-probabilities, scores. Plain data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostro.engine.results import NOT_FINITE, Solution, TokenLogprob
from ostro.errors import SequenceFailed

__all__ = ["Choice", "Completion", "Delta", "Ranked", "Score", "Solution", "TokenLogprob", "score", "solution"]


@dataclass(slots=True)
class Choice:
    """One generated continuation."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop, length, repetition, or error; None while it is still being generated."""
    stopped_by: str | None = None
    """The stop string that ended it, if one did."""
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    """Why the engine gave up on this choice."""

    def as_delta(self) -> "Delta":
        """All of it as one delta, once it has ended."""
        return Delta(self.index, self.text, self.finish_reason, self.token_ids, self.logprobs, self.error)


@dataclass(slots=True)
class Completion:
    """A prompt and what was generated for it."""

    prompt_ids: tuple[int, ...]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token; None for the first."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    has_prediction: bool = False
    """Whether the request came with a prediction of its output."""
    num_accepted: int = 0
    """Predicted tokens that were accepted, and those that were rejected, over all choices."""
    num_rejected: int = 0
    embedding: list[float] | None = None
    solution: Solution | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def num_generated(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice of a stream."""

    index: int
    text: str
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    """The new tokens. Some of their text may still be held back, for a later delta."""
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    """Why the engine gave up, if the finish reason is "error"."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after its prompt."""

    logprob: float
    is_greedy: bool
    """Whether each of its tokens is the most likely one at its position."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """One of several documents, and how relevant it is to a query."""

    index: int
    """The document's index in the request."""
    score: float


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[Ranked]:
    """Best first, at most `top_n` of them; ties keep their order."""
    everything = [Ranked(index, score) for index, score in enumerate(scores)]
    return sorted(everything, key=lambda each: -each.score)[:top_n]


def solution(completion: Completion) -> Solution:
    """The result of a solve request; raises SequenceFailed if the model's numbers are not finite."""
    found = completion.solution
    assert found is not None, "a request to solve ends with a solution"
    if not math.isfinite(found.q_halt + found.q_continue):
        raise SequenceFailed(NOT_FINITE)
    return found


def embedding(completion: Completion) -> list[float]:
    """The result of an embedding request; raises SequenceFailed if the engine gave up on it."""
    _check(completion)
    return completion.embedding or []


def score(completion: Completion) -> Score:
    """The result of a scoring request; raises SequenceFailed if the engine gave up on it."""
    _check(completion)
    scored = [logprob for logprob in completion.prompt_logprobs or () if logprob is not None]
    return Score(
        logprob=sum(logprob.logprob for logprob in scored),
        is_greedy=all(logprob.rank == 1 for logprob in scored),
        num_tokens=len(scored),
    )


def _check(completion: Completion) -> None:
    if error := completion.choices[0].error:
        raise SequenceFailed(error)

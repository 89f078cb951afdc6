"""A model's results for a sequence besides its next token: log-probabilities, and the answer to a solve request."""

from dataclasses import dataclass, replace

NOT_FINITE = (
    "The model computed a number that is not finite: its weights hold NaN or infinity, or overflow its dtype. "
    "Check its checkpoint, or load it in a wider dtype."
)
"""The error of a sequence whose logits, log-probabilities or embedding are not finite."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's log-probability under the model's own distribution, before masks, temperature and truncation."""

    token_id: int
    logprob: float
    rank: int
    """The token's rank by likelihood; 1 if no token is more likely."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities, best first: exactly as many as were asked for."""

    def listing(self, count: int) -> "TokenLogprob":
        """The same, with at most `count` of the most likely tokens."""
        return self if len(self.top) <= count else replace(self, top=self.top[:count])


@dataclass(frozen=True, slots=True)
class Solution:
    """One sequence's answer to a solve request."""

    predictions: list[int]
    """The likeliest token at each position."""
    steps: int
    """Outer steps taken."""
    q_halt: float
    """The q-head's two logits after the last step."""
    q_continue: float

    @property
    def halted(self) -> bool:
        """Whether the model itself would halt there."""
        return self.q_halt > self.q_continue

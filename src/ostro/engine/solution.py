"""The answer to a solve request. Plain data."""

from dataclasses import dataclass


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

"""/hrm/solve: grids of tokens in, a token for every position out."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ostro.schemas.prompts import MAX_PROMPTS, TokenIds
from ostro.schemas.wire import RequestModel, WireModel, refusal

_Number = Annotated[int, Field(ge=0)]


class SolveRequest(RequestModel):
    """Inputs are as in upstream's datasets: all positions of a puzzle, padded as in training."""

    model: str = "default"
    inputs: Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    """Token ids of each puzzle, position by position."""
    puzzle_ids: Annotated[list[_Number], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    """Each puzzle's identifier, one per input; the default is 0, the blank identifier."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.puzzle_ids is not None and len(self.puzzle_ids) != len(self.inputs):
            counts = f"{len(self.inputs)} and {len(self.puzzle_ids)}"
            raise refusal("puzzle_ids", f"must be as many as inputs, got {counts}")
        return self


class SolveResponse(WireModel):
    predictions: list[list[int]]
    """The most likely token at each position of each puzzle, in order."""
    steps: list[int]
    """Outer steps that each puzzle took."""
    halted: list[bool]
    """Whether the q-head preferred to halt after the last step."""
    q_halt: list[float]
    """The q-head's logits: above 0, the model believes its answer is right."""
    q_continue: list[float]

"""Sequences of different lengths as rows of one matrix, concatenated without padding: matmuls process all rows at once,
and attention, which must not mix sequences, batches neighbours of equal length.

    rows    a a a a | b b b b | c c | d
    runs    └─ 2 of 4 rows ──┘ └ 1 ┘ └ 1 of 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """`count` consecutive sequences of `length` rows each, from row `start` on."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


class Ragged:
    """Where each sequence's rows are. Built once per pass."""

    __slots__ = ("lengths", "positions", "runs", "starts")

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.starts = (0, *accumulate(self.lengths))[:-1]
        self.runs = []
        start = 0
        for length, group in groupby(self.lengths):
            self.runs.append(SequenceRun(start, sum(1 for _ in group), length))
            start = self.runs[-1].end
        self.positions: Tensor = torch.cat(
            [torch.arange(run.length, device=device).repeat(run.count) for run in self.runs]
        )
        """Each row's position in its sequence."""

    def rows(self, sequence: int) -> range:
        start = self.starts[sequence]
        return range(start, start + self.lengths[sequence])

    def take(self, sequences: Sequence[int]) -> tuple["Ragged", Tensor]:
        """A layout of some of the sequences, and their row numbers in this one."""
        device = self.positions.device
        rows = torch.tensor([row for sequence in sequences for row in self.rows(sequence)], device=device)
        return Ragged([self.lengths[sequence] for sequence in sequences], device), rows

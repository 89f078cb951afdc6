"""Orders in which checkpoints store a projection's rows, where they differ from ours: all queries, then all keys, then
all values; all gates, then all ups; and within a head, two dimensions that rotate together are half the rotated
dimensions apart. Imports no numpy.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


class RowOrder(Protocol):
    def stored(self, rows: int) -> list[int]:
        """For each of our `rows` rows, its number in the checkpoint."""


@dataclass(frozen=True, slots=True)
class ByHead:
    """Each head's rows of all parts follow each other, in one tensor."""

    heads: int
    widths: tuple[int, ...]
    """A head's rows of each part."""
    last_first: bool = False
    """Whether ours begin with the last part instead of the first."""

    def stored(self, rows: int) -> list[int]:
        stride, starts = sum(self.widths), (0, *accumulate(self.widths))
        assert rows == self.heads * stride
        parts = range(len(self.widths))
        return [
            head * stride + starts[part] + row
            for part in (reversed(parts) if self.last_first else parts)
            for head in range(self.heads)
            for row in range(self.widths[part])
        ]


@dataclass(frozen=True, slots=True)
class ByTurns:
    """Rows of the first and the second half alternate: gates and ups."""

    def stored(self, rows: int) -> list[int]:
        return [*range(0, rows, 2), *range(1, rows, 2)]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Dimensions 2i and 2i + 1 of a head rotate together; those from `rotated` on do not rotate."""

    head_dim: int
    rotated: int

    def stored(self, rows: int) -> list[int]:
        head = [*range(0, self.rotated, 2), *range(1, self.rotated, 2), *range(self.rotated, self.head_dim)]
        return [first + row for first in range(0, rows, self.head_dim) for row in head]

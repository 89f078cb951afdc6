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
class Excerpt:
    """Our rows are those from `first` on of a tensor that holds more."""

    first: int
    total: int
    """Rows of that tensor."""
    order: RowOrder | None = None
    """The order of all its rows, where it is not the one in which ours are counted."""

    def stored(self, rows: int) -> list[int]:
        whole = range(self.total) if self.order is None else self.order.stored(self.total)
        return list(whole[self.first : self.first + rows])


@dataclass(frozen=True, slots=True)
class Tiled:
    """Ours go through the groups of heads, one head of each at a time; stored are all heads of one group, then all of
    the next.
    """

    groups: int
    heads: int
    """Heads in a group."""
    width: int
    """Rows of a head."""
    first: int = 0
    """Rows before those of heads, in the same order."""

    def stored(self, rows: int) -> list[int]:
        assert rows == self.first + self.groups * self.heads * self.width
        return [
            *range(self.first),
            *(
                self.first + (group * self.heads + head) * self.width + row
                for head in range(self.heads)
                for group in range(self.groups)
                for row in range(self.width)
            ),
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

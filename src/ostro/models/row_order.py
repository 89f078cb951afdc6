"""Orders in which checkpoints store a projection's rows, where they differ from ours: all queries, then all keys, then
all values; all gates, then all ups; and within a head, two dimensions that rotate together are half the rotated
dimensions apart. Imports no numpy.
"""

from dataclasses import dataclass
from typing import Protocol


class RowOrder(Protocol):
    def stored(self, rows: int) -> list[int]:
        """For each of our `rows` rows, its number in the checkpoint."""


@dataclass(frozen=True, slots=True)
class ByHead:
    """Each head's query, key and value rows follow each other, in one tensor for all three."""

    heads: int

    def stored(self, rows: int) -> list[int]:
        width = rows // (3 * self.heads)
        return [
            (3 * head + part) * width + row for part in range(3) for head in range(self.heads) for row in range(width)
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

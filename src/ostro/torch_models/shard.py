"""One rank's part of a model, and what the ranks exchange. Knows no processes and no transport."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ostro.models.cut import Cut


class Collective(Protocol):
    """Operations that all ranks of a group do together, in the same order. Every rank gets the same bits."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks. May overwrite x."""

    def max(self, x: Tensor) -> Tensor:
        """The element-wise maximum over all ranks. May overwrite x."""

    def gather(self, x: Tensor) -> Tensor:
        """[rows, n] -> [rows, ranks * n]: all ranks' columns, in order."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x with the first rank's."""


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    cut: Cut
    group: Collective

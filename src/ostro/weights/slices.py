"""Weights that can be read in parts, so that a process need not hold more of a model than it runs. Imports no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ostro.weights.arrays import Floats, Weight, WeightArray

Index = tuple[slice, ...]
"""One range per dimension, each with a start and a stop."""


class SlicedWeight(Protocol):
    """One weight of a checkpoint. Valid until the checkpoint is asked for the next one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def holds_numbers(self) -> bool:
        """Whether `read` can make floats of it."""

    @property
    def format_name(self) -> str:
        """The number format's common name."""

    def read(self, index: Index) -> Floats:
        """A part of it in float32."""


@dataclass(slots=True)
class SlicedArray:
    """Parts of an array that is in memory or mapped."""

    array: Weight
    _decoded: Floats | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def holds_numbers(self) -> bool:
        return self.array.is_float or self.array.is_quantized

    @property
    def format_name(self) -> str:
        return self.array.format_name

    def read(self, index: Index) -> Floats:
        if isinstance(self.array, WeightArray) and self.array.is_plain:
            return self.array.cut(index).floats()
        # Decoded once, not for each part: blocks of quantized numbers cannot be cut, and reordering needs all rows.
        if self._decoded is None:
            self._decoded = self.array.floats()
        return self._decoded[index]


def sliced(arrays: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, SlicedWeight]]:
    return ((name, SlicedArray(array)) for name, array in arrays)

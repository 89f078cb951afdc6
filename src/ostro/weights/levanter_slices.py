"""Parts of a Levanter checkpoint's weights. Knows which box of an array holds a part of the Hub's tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ostro.weights.arrays import Floats, WeightArray
from ostro.weights.levanter_arrays import StoredArray
from ostro.weights.levanter_layout import Shape
from ostro.weights.slices import Index


@dataclass(frozen=True, slots=True)
class LevanterSlices:
    """One weight. Its array may hold all layers, and may have several axes where the Hub's tensor has one."""

    array: StoredArray
    layer: int | None
    """None if the array is not stacked."""
    shape: Shape

    @property
    def holds_numbers(self) -> bool:
        return True

    @property
    def format_name(self) -> str:
        return self.array.dtype

    def read(self, index: Index) -> Floats:
        layers = () if self.layer is None else (slice(self.layer, self.layer + 1),)
        axes = _axes(self.array.shape[len(layers) :], self.shape)
        covers = [_covering(stored, part) for stored, part in zip(axes, index, strict=True)]
        box = tuple(part for covered, _ in covers for part in covered)
        values = WeightArray.of(self.array.read_box((*layers, *box))).floats()
        flattened = values.reshape([prod(map(_length, covered)) for covered, _ in covers])
        starts = [start for _, start in covers]
        return flattened[tuple(slice(at, at + _length(part)) for at, part in zip(starts, index, strict=True))]


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _axes(stored: Shape, shape: Shape) -> list[Shape]:
    """The stored axes that make up each axis of the Hub's tensor."""
    if len(stored) == len(shape):
        return [(size,) for size in stored]
    left = list(stored)
    return [*(tuple(_taken(left, size)) for size in shape[:-1]), tuple(left)]


def _taken(left: list[int], size: int) -> Iterator[int]:
    """Removes axes from the front until they have this many positions."""
    total = 1
    while total < size:
        total *= left[0]
        yield left.pop(0)


def _covering(axes: Shape, part: slice) -> tuple[Index, int]:
    """The smallest box around a range of flattened axes, and where in the flattened box the range starts."""
    if len(axes) == 1:
        return (part,), 0
    inner = prod(axes[1:])
    first, last = part.start // inner, (part.stop - 1) // inner
    within = slice(part.start - first * inner, part.stop - first * inner)
    if first == last:
        box, start = _covering(axes[1:], within)
        return (slice(first, first + 1), *box), start
    return (slice(first, last + 1), *(slice(0, size) for size in axes[1:])), within.start

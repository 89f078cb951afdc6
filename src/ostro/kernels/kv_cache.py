"""The KV cache of torch's plain attention: keys and values of all layers. Knows slots; knows no pages and no sequences.

Layers with the same heads are in one tensor, a stack, [layers, key or value, kv_heads, slots, head_dim]. Most models
have one stack; a layer that reads another's keys and values is in none.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from torch import Tensor


class Cell(NamedTuple):
    """A layer's place: a stack, and the number of the layer there."""

    stack: int
    number: int


class KVCache:
    def __init__(self, stacks: Sequence[Tensor], cells: Sequence[Cell | None]) -> None:
        self.stacks, self._cells = stacks, cells

    @classmethod
    def of_heads(
        cls, heads: Sequence[tuple[int, int]], slots: int, allocate: Callable[[tuple[int, ...]], Tensor]
    ) -> Self:
        """`heads` are each layer's number of KV heads, 0 if it has none of its own, and their width."""
        kinds = [kind for kind in dict.fromkeys(heads) if kind[0]]
        layers = Counter[tuple[int, int]]()
        cells: list[Cell | None] = []
        for kind in heads:
            cells.append(Cell(kinds.index(kind), layers[kind]) if kind in kinds else None)
            layers[kind] += 1
        return cls([allocate((layers[kind], 2, kind[0], slots, kind[1])) for kind in kinds], cells)

    @classmethod
    def of(cls, stack: Tensor) -> Self:
        """For layers that all have the same heads."""
        return cls([stack], [Cell(0, index) for index in range(len(stack))])

    @property
    def device_type(self) -> str:
        return self.stacks[0].device.type

    def cell(self, layer: int) -> Cell:
        cell = self._cells[layer]
        assert cell is not None, "the layer has keys and values of its own"
        return cell

    def layer(self, layer: int) -> Tensor:
        """[key or value, kv_heads, slots, head_dim]"""
        stack, number = self.cell(layer)
        return self.stacks[stack][number]

    def __iter__(self) -> Iterator[Tensor]:
        return (self.layer(layer) for layer, cell in enumerate(self._cells) if cell is not None)

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies `size` slots in all layers."""
        for stack in self.stacks:
            stack[..., target : target + size, :] = stack[..., source : source + size, :]

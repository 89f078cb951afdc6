"""Recurrent states in torch: where they are kept, and how a step advances them. Knows slots, and no
layer's formulas.

A slot holds one sequence's state in all layers, at one position. A step's sequences are advanced together, longest
first, so that those with a further token are always the first ones:

    sequence 1   a b c d        time 0   a e h
    sequence 2   e f g          time 1   b f
    sequence 3   h              time 2   c g
                                time 3   d

The recurrence itself is the definition: each token takes one step of it, in prompts too. So it does not matter where a
prompt is cut, and a state may be captured after any token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ostro.models.architecture import State

Advance = Callable[..., Tensor]
"""Advances matrices by a token, in place: takes them, [sequences, heads, …], and what is read of each sequence's token.
Returns what it computes for each token.
"""


class Mixer(Protocol):
    """See `torch_models.base.RecurrentMixer`."""

    @property
    def plain(self) -> Callable[..., Tensor]: ...


class LayerState(NamedTuple):
    """One layer's part of all slots."""

    inputs: Tensor
    """[slots, latest inputs, channels]"""
    matrices: Tensor | None
    """[slots, heads, rows, columns], in float32"""


class StateCache:
    """The states of all layers."""

    def __init__(
        self, states: Sequence[State | None], slots: int, allocate: Callable[[tuple[int, ...], bool], Tensor]
    ) -> None:
        """`allocate` makes zeros of a shape; the flag asks for float32 instead of the model's number format."""
        self.advanced = 0
        """Tokens so far, one after the other, in each layer: that a long step goes on."""
        self._layers = [None if each is None else _layer_state(each, slots, allocate) for each in states]

    def layer(self, layer: int) -> LayerState:
        found = self._layers[layer]
        assert found is not None, "the layer keeps a state"
        return found

    def clear(self, slots: Sequence[int]) -> None:
        """Makes them states of no tokens."""
        for own in self._tensors():
            own[list(slots)] = 0

    def copy(self, source: int, target: int) -> None:
        for own in self._tensors():
            own[target] = own[source]

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [own for layer in self._layers if layer is not None for own in layer if own is not None]


def _layer_state(state: State, slots: int, allocate: Callable[[tuple[int, ...], bool], Tensor]) -> LayerState:
    matrices = None if state.matrices is None else allocate((slots, *state.matrices), True)
    return LayerState(allocate((slots, *state.inputs), False), matrices)


@dataclass(frozen=True, slots=True)
class StateRows:
    """One sequence's rows in a step, `length` from `offset` on, and the slot of its state, which they advance."""

    offset: int
    length: int
    slot: int
    captures: Sequence[tuple[int, int]] = ()
    """After so many of the rows, the state is copied to this slot."""


class StepStates:
    """The states of one step's sequences, which together have all its rows."""

    def __init__(self, cache: StateCache, rows: Sequence[StateRows], device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.rows = sorted(rows, key=lambda own: -own.length)
        self._slots = self._tensor([own.slot for own in self.rows])
        self._captured = self._tensor([slot for own in self.rows for _, slot in own.captures])
        self._walk = _Walk.of(self.rows)
        self._order = None if self._walk.in_order else self._tensor(self._walk.order)
        self._taps: dict[int, _TapPlaces] = {}

    def mix(self, mixer: Mixer, *rows: Tensor) -> Tensor:
        """What lies between a mixer's projections; see `torch_models.base.States`."""
        return mixer.plain(self, *rows)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A causal convolution of each channel of the rows, in float32. `weight` is [taps, channels], oldest first."""
        kept, taps = self.cache.layer(layer).inputs, len(weight)
        places = self._taps.get(taps)
        if places is None:
            places = self._taps[taps] = self._tap_places(taps)
        known = torch.cat((kept[self._slots].flatten(0, 1), x))
        # Tap by tap, so that a row's sum has the same order however the rows are cut.
        total = weight[0] * known[places.of_rows[0]]
        for tap in range(1, taps):
            total.addcmul_(weight[tap], known[places.of_rows[tap]].float())
        kept[self._slots] = known[places.last]
        if len(self._captured):
            kept[self._captured] = known[places.captured]
        return total if bias is None else total.add_(bias)

    def recur(self, layer: int, size: tuple[int, int, int], advance: Advance, *read: Tensor) -> Tensor:
        """Advances the layer's matrices, of this size, row by row. The tensors read have a row for each, and so has the
        result.
        """
        kept = self.cache.layer(layer).matrices
        assert kept is not None, "the layer keeps matrices"
        assert kept.shape[1:] == size
        matrices = kept[self._slots]
        if self._order is not None:
            read = tuple(own[self._order] for own in read)
        found = []
        for time, (start, count) in enumerate(self._walk.times):
            self.cache.advanced += 1
            found.append(advance(matrices[:count], *(own[start : start + count] for own in read)))
            for sequence, slot in self._walk.captures.get(time, ()):
                kept[slot] = matrices[sequence]
        kept[self._slots] = matrices
        rows = torch.cat(found)
        return rows if self._order is None else torch.empty_like(rows).index_copy_(0, self._order, rows)

    def _tap_places(self, taps: int) -> "_TapPlaces":
        """Where a convolution's inputs are among the kept ones of all sequences, in order, and then the rows."""
        kept = taps - 1

        def place(number: int, position: int) -> int:
            """Where an input of a sequence is; positions below zero came before this step."""
            own = self.rows[number]
            return number * kept + kept + position if position < 0 else len(self.rows) * kept + own.offset + position

        def before(number: int, end: int) -> list[int]:
            return [place(number, position) for position in range(end - kept, end)]

        numbered = sorted(enumerate(self.rows), key=lambda each: each[1].offset)
        of_rows = [
            [place(number, at + tap - kept) for number, own in numbered for at in range(own.length)]
            for tap in range(taps)
        ]
        last = [before(number, own.length) for number, own in enumerate(self.rows)]
        captured = [before(number, after) for number, own in enumerate(self.rows) for after, _ in own.captures]
        return _TapPlaces(self._tensor(of_rows), self._tensor(last), self._tensor(captured))

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


class _TapPlaces(NamedTuple):
    of_rows: Tensor
    """[taps, rows]"""
    last: Tensor
    """[sequences, kept inputs]"""
    captured: Tensor
    """[captures, kept inputs]"""


class _Walk(NamedTuple):
    """The rows in the order of time; see above."""

    order: list[int]
    times: list[tuple[int, int]]
    """The first row of each time in this order, and the number of rows."""
    captures: dict[int, list[tuple[int, int]]]
    """By time: sequences to capture after it, and the slots."""

    @property
    def in_order(self) -> bool:
        return self.order == list(range(len(self.order)))

    @classmethod
    def of(cls, rows: Sequence[StateRows]) -> "_Walk":
        """`rows` are in order of length, longest first."""
        longest = rows[0].length
        by_time = [[own.offset + time for own in rows if own.length > time] for time in range(longest)]
        counts = [len(each) for each in by_time]
        captures: dict[int, list[tuple[int, int]]] = {}
        for number, own in enumerate(rows):
            for after, slot in own.captures:
                captures.setdefault(after - 1, []).append((number, slot))
        starts = [0, *accumulate(counts)]
        return cls(list(chain.from_iterable(by_time)), list(zip(starts, counts, strict=False)), captures)

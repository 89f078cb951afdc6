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

Drafts are a step's last rows of a sequence. They are computed like others, but the slot keeps the state before them,
and what their rows would do to it is kept in a lane. The next step begins with those that were accepted, whose results
it drops: so the state is the one that a step without drafts leaves.
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


Rows = tuple[Tensor, ...]
"""Tensors with a row per token."""


class DraftRows:
    """The rows of drafts that change one part of a layer's states, by lane."""

    def __init__(self) -> None:
        self._lanes: dict[int, Rows] = {}

    def behind(self, rows: Rows, accepted: Sequence[tuple[int, int]]) -> Rows:
        """The rows with accepted drafts behind them: so many of each lane's."""
        if not accepted:
            return rows
        kept = [[own[:count] for own in self._lanes[lane]] for lane, count in accepted]
        return tuple(map(torch.cat, zip(rows, *kept, strict=True)))

    def keep(self, rows: Rows, drafted: Sequence[tuple[int, int]], at: Tensor) -> None:
        """Keeps the rows `at` these places: so many in each lane."""
        if not drafted:
            return
        lanes, counts = zip(*drafted, strict=True)
        found = zip(*(own[at].split(counts) for own in rows), strict=True)
        self._lanes |= zip(lanes, found, strict=True)


class LayerDrafts(NamedTuple):
    inputs: DraftRows
    """Those of the convolution."""
    read: DraftRows
    """What the recurrence reads."""


class StateCache:
    """The states of all layers."""

    def __init__(
        self, states: Sequence[State | None], slots: int, allocate: Callable[[tuple[int, ...], bool], Tensor]
    ) -> None:
        """`allocate` makes zeros of a shape; the flag asks for float32 instead of the model's number format."""
        self.advanced = 0
        """Tokens so far, one after the other, in each layer: that a long step goes on."""
        self._layers = [None if each is None else _layer_state(each, slots, allocate) for each in states]
        self._drafts = [LayerDrafts(DraftRows(), DraftRows()) for _ in states]

    def layer(self, layer: int) -> LayerState:
        found = self._layers[layer]
        assert found is not None, "the layer keeps a state"
        return found

    def drafts(self, layer: int) -> LayerDrafts:
        return self._drafts[layer]

    def clear(self, slots: Sequence[int]) -> None:
        """Makes them states of no tokens."""
        for own in self.tensors:
            own[list(slots)] = 0

    def copy(self, source: int, target: int) -> None:
        for own in self.tensors:
            own[target] = own[source]

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of all layers, [slots, …] each."""
        return [own for layer in self._layers if layer is not None for own in layer if own is not None]


def _layer_state(state: State, slots: int, allocate: Callable[[tuple[int, ...], bool], Tensor]) -> LayerState:
    matrices = None if state.matrices is None else allocate((slots, *state.matrices), True)
    return LayerState(allocate((slots, *state.inputs), False), matrices)


@dataclass(frozen=True, slots=True)
class StateRows:
    """One sequence's rows in a step, `length` from `offset` on, and the slot of its state, which they advance but for
    those of drafts.
    """

    offset: int
    length: int
    slot: int
    captures: Sequence[tuple[int, int]] = ()
    """After so many of the rows, the state is copied to this slot."""
    drafts: int = 0
    """How many of the rows, the last ones, are drafts, to be kept in the lane."""
    accepted: int = 0
    """How many drafts of the step before, in the lane, advance the state first."""
    lane: int = 0

    @property
    def known(self) -> int:
        """Rows that are no drafts."""
        return self.length - self.drafts

    @property
    def steps(self) -> int:
        """Tokens that are computed one after the other."""
        return self.accepted + self.length


class StepStates:
    """The states of one step's sequences, which together have all its rows."""

    def __init__(self, cache: StateCache, rows: Sequence[StateRows], device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.rows = sorted(rows, key=lambda own: -own.steps)
        self._number = sum(own.length for own in rows)
        self._slots = self._tensor([own.slot for own in self.rows])
        self._captured = self._tensor([slot for own in self.rows for _, slot in own.captures])
        self._accepted = [(own.lane, own.accepted) for own in self.rows if own.accepted]
        self._drafted = [(own.lane, own.drafts) for own in self.rows if own.drafts]
        drafts = (range(own.offset + own.known, own.offset + own.length) for own in self.rows)
        self._draft_rows = self._tensor(list(chain.from_iterable(drafts)))
        self._behind = list(accumulate((own.accepted for own in self.rows), initial=self._number))
        self._walk = _Walk.of(self.rows, self._row)
        self._whole = self._tensor(self._walk.whole)
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
        drafts = self.cache.drafts(layer).inputs
        known = torch.cat((kept[self._slots].flatten(0, 1), *drafts.behind((x,), self._accepted)))
        drafts.keep((x,), self._drafted, self._draft_rows)
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
        matrices, drafts = kept[self._slots], self.cache.drafts(layer).read
        own = drafts.behind(read, self._accepted)
        drafts.keep(read, self._drafted, self._draft_rows)
        if self._order is not None:
            own = tuple(each[self._order] for each in own)
        found = []
        for time, (start, count) in enumerate(self._walk.times):
            self.cache.advanced += 1
            found.append(advance(matrices[:count], *(each[start : start + count] for each in own)))
            for sequence, slot in self._walk.captures.get(time, ()):
                kept[slot] = matrices[sequence]
        if self._drafted:
            kept[self._slots[self._whole]] = matrices[self._whole]
        else:
            kept[self._slots] = matrices
        rows = torch.cat(found)
        if self._order is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, self._order, rows)[: self._number]

    def _row(self, number: int, position: int) -> int:
        """Where a sequence's row is, with accepted drafts behind all rows: these have positions below zero."""
        own = self.rows[number]
        return own.offset + position if position >= 0 else self._behind[number] + own.accepted + position

    def _tap_places(self, taps: int) -> "_TapPlaces":
        """Where a convolution's inputs are among the kept ones of all sequences, in order, and then the rows."""
        kept = taps - 1

        def place(number: int, position: int) -> int:
            """Where an input of a sequence is; those before its accepted drafts came before this step."""
            before = position + self.rows[number].accepted
            return number * kept + kept + before if before < 0 else len(self.rows) * kept + self._row(number, position)

        def before(number: int, end: int) -> list[int]:
            return [place(number, position) for position in range(end - kept, end)]

        numbered = sorted(enumerate(self.rows), key=lambda each: each[1].offset)
        of_rows = [
            [place(number, at + tap - kept) for number, own in numbered for at in range(own.length)]
            for tap in range(taps)
        ]
        last = [before(number, own.known) for number, own in enumerate(self.rows)]
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
    """By time: sequences to capture after it, and the slots. A sequence's own slot is one of them if drafts follow."""
    whole: list[int]
    """The sequences without drafts, whose state is the one at the end."""

    @property
    def in_order(self) -> bool:
        return self.order == list(range(len(self.order)))

    @classmethod
    def of(cls, rows: Sequence[StateRows], row: Callable[[int, int], int]) -> "_Walk":
        """`rows` are in order of time, longest first; `row` numbers a sequence's rows by position."""
        by_time = [
            [row(number, time - own.accepted) for number, own in enumerate(rows) if own.steps > time]
            for time in range(rows[0].steps)
        ]
        counts = [len(each) for each in by_time]
        captures: dict[int, list[tuple[int, int]]] = {}
        for number, own in enumerate(rows):
            before_drafts = [(own.known, own.slot)] if own.drafts else []
            for after, slot in (*own.captures, *before_drafts):
                captures.setdefault(own.accepted + after - 1, []).append((number, slot))
        starts = [0, *accumulate(counts)]
        whole = [number for number, own in enumerate(rows) if not own.drafts]
        return cls(list(chain.from_iterable(by_time)), list(zip(starts, counts, strict=False)), captures, whole)

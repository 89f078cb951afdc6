"""What every rank computes in a step on torch, as data. Knows no tensors and no sequences."""

from collections.abc import Iterator, Sequence

import msgspec

from ostro.kernels.paged_attention import Piece
from ostro.kernels.recurrent_state import StateRows


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Computes the hidden states of all tokens, and stores their keys and values."""

    ids: Sequence[int]
    pieces: Sequence[Piece]
    """The pieces of the flat batch, in order."""
    copies: Sequence[tuple[int, int]] = ()
    """(from, to) pages to copy first."""
    adapters: Sequence[tuple[int, int]] = ()
    """Adapters' slots and their numbers of rows, in order; empty if the model has none."""
    masks: bool = True
    """See `PagedAttention`."""
    states: Sequence[StateRows] = ()
    """The sequences' recurrent states, if the model has such."""
    fresh: Sequence[int] = ()
    """Slots of sequences that begin."""
    state_copies: Sequence[tuple[int, int]] = ()
    """(from, to) slots to copy before."""

    def positions(self) -> Iterator[int]:
        for piece in self.pieces:
            yield from range(piece.start, piece.end)


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Computes logits of some of the latest step's tokens."""

    rows: Sequence[int] | None
    """None is all, in order."""

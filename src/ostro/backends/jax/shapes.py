"""The shapes that steps are padded to: few, so that few programs are compiled. Imports no JAX, for planning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostro.errors import ModelError

PAGES_PER_TURN = 8
"""Pages that attention reads at a time. The width of a page table is a multiple of it."""
_FEWEST_ROWS = 8
"""Fewer rows take as long as this many."""
_FEWEST_TOKENS = 64
_FEW_ROWS = 32
"""Up to this many rows, launching programs takes as long as the device does."""
_GROWTH = 4
"""Each shape is this many times as large as the one before it."""


class StepShape(NamedTuple):
    """The sizes that one compiled step is made for."""

    tokens: int
    tiles: int
    width: int
    """Tokens per tile."""
    rows: int
    """Sequences, and rows of logits."""
    pages: int
    """Pages per sequence."""
    adapted: bool = False
    """Whether any of its tokens may have an adapter."""
    spans: int = 0
    """Spans of tokens that states are advanced by; 0 for a model without states."""

    def __str__(self) -> str:
        adapted = ", with adapters" if self.adapted else ""
        return f"of {self.tokens} tokens in tiles of {self.width}, {self.rows} rows{adapted}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the fields of StepInputs, in order."""
        adapters = self.tokens if self.adapted else 0
        owners, sequences = (self.tokens, self.rows) if self.spans else (0, 0)
        states = (owners, *(sequences,) * 2, *(self.spans,) * 4)
        return (self.rows * self.pages, *(self.tokens,) * 3, *(self.tiles,) * 3, self.rows, adapters, *states)

    @property
    def num_integers(self) -> int:
        return sum(self.sizes)

    @property
    def draws(self) -> bool:
        """Whether there is a program that also draws, to save launches."""
        return self.width == 1 and self.rows <= _FEW_ROWS

    def holds(self, tokens: int, sequences: int, longest: int) -> bool:
        """Whether a step of this many tokens fits, `longest` of them of one sequence."""
        return tokens <= self.tokens and sequences <= self.rows and (longest == 1 or self.width > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A runner's capacities. They decide which programs are compiled."""

    page_size: int
    num_pages: int
    max_batch_tokens: int = 512
    max_batch_seqs: int = 64
    num_states: int = 0
    """Slots for recurrent states; 0 for a model without any."""

    def shapes(self, max_seq_len: int, *, tile: int = 16) -> list[StepShape]:
        """Shapes for steps of one token per sequence, then shapes for all others; each kind from small to large.

        Any batch within the capacities fits into the last one. `tile` is the width of tiles of more than one token.
        """
        pages = -(-max_seq_len // (self.page_size * PAGES_PER_TURN)) * PAGES_PER_TURN
        rows = list(_growing(_FEWEST_ROWS, self.max_batch_seqs))
        decoding = [StepShape(tokens=n, tiles=n, width=1, rows=n, pages=pages) for n in rows]
        most = rows[-1]
        others = [
            # Each sequence may leave its last tile unfilled.
            StepShape(tokens=n, tiles=min(n, -(-n // tile) + most), width=tile, rows=most, pages=pages)
            for n in _growing(_FEWEST_TOKENS, self.max_batch_tokens)
        ]
        # A span for each sequence, and one for each slot that is captured to.
        return [
            shape._replace(spans=min(shape.tokens, shape.rows + self.num_states) if self.num_states else 0)
            for shape in decoding + others
        ]


def smallest_shape(shapes: Sequence[StepShape], *, tokens: int, sequences: int, longest: int) -> StepShape:
    """The first shape that holds a step of this many tokens, `longest` of them of one sequence."""
    for shape in shapes:
        if shape.holds(tokens, sequences, longest):
            return shape
    raise ModelError(
        f"No program was compiled for a step of {tokens} tokens in {sequences} sequences: the limits of the engine and "
        "of its runner differ. This is a bug: please report it."
    )


def _growing(least: int, most: int) -> Iterator[int]:
    """Sizes from `least` on, the last of which is at least `most`."""
    size = least
    while size < most:
        yield size
        size *= _GROWTH
    yield max(least, most)

"""Which rows of a step advance which recurrent states, as tables that kernels read. Knows no mixer's formulas.

A sequence's rows in a step are a chunk. It is cut into pieces where the state is wanted, and after `PIECE_ROWS` rows:

    chunk    [ a a a a a a a a a a a a a a ]         state of slot 3; after its tenth row, also wanted in slot 7
    pieces   [ a a a a a a a a a a ][ a a a a ]
                               -> 7      -> 3

One program takes the pieces of a chunk in order and keeps its part of the state in registers. The chunk's own slot is
written last: until then it holds what the chunk begins with. Rows that are a sequence's only one may be told as
`SingleRows` instead, which need no tables.

The inputs of convolutions are a ring: the input at position p is at p % taps. So a row's input replaces none that this
row reads, and programs that share channels need not wait for each other.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PIECE_ROWS = 64

# Columns of `ChunkTables.chunks`. A slot of -1 is no chunk at all; at position 0 the state begins with zeros.
SLOT, POSITION, FIRST_PIECE, END_PIECE = range(4)
CHUNK_FIELDS = 4
# Columns of `ChunkTables.pieces`. `KEPT` is the slot that takes the state behind the piece, or -1. Pieces may be empty.
FIRST_ROW, ROWS, KEPT, CHUNK = range(4)
PIECE_FIELDS = 4

Array = npt.NDArray[np.int32]


class KeptState(NamedTuple):
    """One layer's part of all slots; consecutive slots may be far apart."""

    inputs: Tensor
    """[slots, taps, channels], a ring by position, in the model's number format"""
    matrices: Tensor | None
    """[slots, heads, rows, columns], in float32"""


class SingleRows(NamedTuple):
    """Rows that are their sequences' only ones; the step's first rows."""

    slots: Tensor
    """int32 [rows]; -1 for a row without a sequence, of which nothing may be kept"""
    positions: Tensor
    """int64 [rows]"""
    captured: Tensor
    """int32 [rows]: another slot that takes the state behind the row, or -1"""


class ChunkTables(NamedTuple):
    """Chunks on the device; see above for columns."""

    chunks: Tensor
    """int32 [chunks, CHUNK_FIELDS]"""
    pieces: Tensor
    """int32 [pieces, PIECE_FIELDS], those of each chunk together"""


class StateChunk(NamedTuple):
    first: int
    """Its first row in the step."""
    rows: int
    slot: int
    position: int
    """The position of its first row in the sequence."""
    captures: Sequence[tuple[int, int]] = ()
    """(rows, slot) pairs: after so many of the rows, the slot takes the state, too. In order."""


def tables_of_singles(rows: SingleRows) -> ChunkTables:
    """The same rows as chunks, made on the device."""
    number = torch.arange(len(rows.slots), dtype=torch.int32, device=rows.slots.device)
    one, none = torch.ones_like(number), torch.zeros_like(number)
    chunks = torch.stack((rows.slots, rows.positions.to(torch.int32), 2 * number, 2 * number + 2), 1)
    computed, kept = (number, one, rows.captured, number), (number + 1, none, rows.slots, number)
    return ChunkTables(chunks, torch.stack((*computed, *kept), 1).view(-1, PIECE_FIELDS))


def chunk_tables(chunks: Sequence[StateChunk]) -> tuple[Array, Array]:
    """`ChunkTables` on the host."""
    listed: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    for number, chunk in enumerate(chunks):
        first = len(pieces)
        pieces += [(chunk.first + start, rows, slot, number) for start, rows, slot in _cut(chunk)]
        listed.append((chunk.slot, chunk.position, first, len(pieces)))
    return _array(listed, CHUNK_FIELDS), _array(pieces, PIECE_FIELDS)


def _cut(chunk: StateChunk) -> Iterator[tuple[int, int, int]]:
    """The start of each piece in the chunk, its rows, and who takes the state behind it."""
    start = 0
    for end, slot in (*chunk.captures, (chunk.rows, chunk.slot)):
        while end - start > PIECE_ROWS:
            yield start, PIECE_ROWS, -1
            start += PIECE_ROWS
        yield start, end - start, slot
        start = end


def _array(rows: Sequence[tuple[int, ...]], width: int) -> Array:
    return np.array(rows, dtype=np.int32).reshape(-1, width)

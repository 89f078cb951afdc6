"""A step's integers, as its program reads them and as a batch fills them in. Works on all tokens at once: a loop over
hundreds of sequences would take longer than the device does.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.backends.jax.shapes import Sizes, StepShape
from ostro.backends.page_rows import PageRows
from ostro.engine.batch import Chunk
from ostro.engine.sequence import PENDING

Ints = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.signedinteger[Any]]


class StepInputs(NamedTuple):
    """A step's integers. They travel as one array, because each argument makes launching a program slower."""

    table: Any
    """[rows, pages]. The first part, because kernels want it aligned, and it may be read where it arrives."""
    tokens: Any
    """Ids; -1 - r for the token that the step before this one drew in row r."""
    positions: Any
    slots: Any
    """Where each token's key and value go; out of range for padding, whose writes are dropped."""
    tile_first: Any
    """The number of each tile's first token; out of range for padding."""
    tile_length: Any
    tile_row: Any
    """The row of its sequence in the table."""
    asked: Any
    """The numbers of the tokens whose logits are wanted."""
    adapters: Any
    """The numbers of the tokens' adapters, 0 for none; nothing if the shape is not adapted."""

    @classmethod
    def cut(cls, integers: Any, shape: StepShape) -> "StepInputs":
        """Views of the parts of one array; works on numpy's and JAX's."""
        table, *others = (integers[part] for part in _parts(shape))
        return cls(table.reshape(shape.rows, shape.pages), *others)

    @classmethod
    def padding(cls, shape: StepShape, num_slots: int) -> Ints:
        """An array for a step without tokens."""
        integers = np.zeros(shape.num_integers, np.int32)
        parts = cls.cut(integers, shape)
        parts.slots[:] = num_slots
        parts.tile_first[:] = shape.tokens
        return integers


@cache
def _parts(shape: StepShape) -> list[slice]:
    return [slice(end - size, end) for end, size in zip(accumulate(shape.sizes), shape.sizes, strict=True)]


class InputWriter:
    """Writes batches into arrays. Holds the page table, of which little changes from step to step."""

    def __init__(self, sizes: Sizes, shapes: Sequence[StepShape], number: Callable[[str | None], int]) -> None:
        """`number` maps an adapter's name to its number."""
        self._number = number
        self._page_size, self._num_slots = sizes.page_size, sizes.num_pages * sizes.page_size
        self._table = np.zeros((shapes[-1].rows, shapes[-1].pages), np.int32)
        self._held = PageRows(*self._table.shape)
        self._order = np.arange(len(self._table))
        self._padding: dict[StepShape, Ints] = {}

    def write(self, chunks: Sequence[Chunk], shape: StepShape, reference: Callable[[int], int]) -> Ints:
        """`reference` maps a sequence to the reference of its token that is still on the device."""
        if shape not in self._padding:
            self._padding[shape] = StepInputs.padding(shape, self._num_slots)
        integers = self._padding[shape].copy()
        inputs = StepInputs.cut(integers, shape)
        inputs.table[:] = self._updated(chunks)[: shape.rows]
        starts = np.array([chunk.start for chunk in chunks])
        if shape.width == 1:
            rows = ends = tile_rows = self._order[: len(chunks)]
            positions = starts
            inputs.tile_first[: len(rows)], inputs.tile_length[: len(rows)] = rows, 1
        else:
            lengths = np.array([chunk.length for chunk in chunks])
            ends = np.cumsum(lengths) - 1
            rows = np.repeat(self._order[: len(chunks)], lengths)
            positions = np.arange(len(rows)) + (starts - ends + lengths - 1)[rows]
            tile_rows = self._write_tiles(inputs, lengths, ends - lengths + 1, shape.width)
        own = len(rows)
        inputs.tokens[:own] = [token for chunk in chunks for token in _tokens(chunk, reference)]
        inputs.positions[:own] = positions
        inputs.slots[:own] = (
            self._table[rows, positions // self._page_size] * self._page_size + positions % self._page_size
        )
        inputs.tile_row[: len(tile_rows)] = tile_rows
        asked = ends[[bool(chunk.samples) for chunk in chunks]]
        inputs.asked[: len(asked)] = asked
        if shape.adapted:
            inputs.adapters[:own] = np.array([self._number(chunk.seq.request.adapter) for chunk in chunks])[rows]
        return integers

    def _updated(self, chunks: Sequence[Chunk]) -> Ints:
        cells, pages = self._held.update([chunk.seq.pages for chunk in chunks])
        if cells:
            self._table.reshape(-1)[cells] = pages
        return self._table

    def _write_tiles(self, inputs: StepInputs, lengths: Numbers, offsets: Numbers, width: int) -> Numbers:
        """Cuts chunks into tiles. Returns the tiles' rows."""
        counts = -(-lengths // width)
        rows = np.repeat(self._order[: len(counts)], counts)
        done = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * width
        inputs.tile_first[: len(rows)] = offsets[rows] + done
        inputs.tile_length[: len(rows)] = np.minimum(width, lengths[rows] - done)
        return rows


def _tokens(chunk: Chunk, reference: Callable[[int], int]) -> list[int]:
    ids = chunk.seq.token_ids[chunk.start : chunk.end]
    if ids[-1] == PENDING:
        ids[-1] = reference(chunk.seq.id)
    return ids

"""A step's integers, as its program reads them and as a batch fills them in. Works on all tokens at once: a loop over
hundreds of sequences would take longer than the device does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain
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
    owners: Any
    """The numbers of the tokens' sequences. From here on, nothing if the shape has no spans: see `recurrent.Spans`."""
    first: Any
    """The number of each sequence's first token."""
    state_slots: Any
    """The slot of each sequence's state; out of range for padding, as are the slots below."""
    span_start: Any
    span_length: Any
    span_ended: Any
    span_captured: Any

    @classmethod
    def cut(cls, integers: Any, shape: StepShape) -> "StepInputs":
        """Views of the parts of one array; works on numpy's and JAX's."""
        table, *others = (integers[part] for part in _parts(shape))
        return cls(table.reshape(shape.rows, shape.pages), *others)

    @classmethod
    def padding(cls, shape: StepShape, num_slots: int, num_states: int = 0) -> Ints:
        """An array for a step without tokens."""
        integers = np.zeros(shape.num_integers, np.int32)
        parts = cls.cut(integers, shape)
        parts.slots[:] = num_slots
        parts.tile_first[:] = shape.tokens
        for slots in (parts.state_slots, parts.span_ended, parts.span_captured):
            slots[:] = num_states
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
        self._num_states = sizes.num_states
        self._table = np.zeros((shapes[-1].rows, shapes[-1].pages), np.int32)
        self._held = PageRows(*self._table.shape)
        self._order = np.arange(len(self._table))
        self._padding: dict[StepShape, Ints] = {}

    def write(self, chunks: Sequence[Chunk], shape: StepShape, reference: Callable[[int], int]) -> Ints:
        """`reference` maps a sequence to the reference of its token that is still on the device."""
        if shape not in self._padding:
            self._padding[shape] = StepInputs.padding(shape, self._num_slots, self._num_states)
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
        if shape.spans:
            inputs.owners[:own] = rows
            self._write_spans(inputs, chunks, is_single=shape.width == 1)
        return integers

    def _updated(self, chunks: Sequence[Chunk]) -> Ints:
        cells, pages = self._held.update([chunk.seq.pages for chunk in chunks])
        if cells:
            self._table.reshape(-1)[cells] = pages
        return self._table

    def _write_spans(self, inputs: StepInputs, chunks: Sequence[Chunk], *, is_single: bool) -> None:
        first = list(accumulate((chunk.length for chunk in chunks[:-1]), initial=0))
        inputs.first[: len(chunks)] = first
        inputs.state_slots[: len(chunks)] = [chunk.state for chunk in chunks]
        cut = (_spans(chunk, start, self._num_states) for chunk, start in zip(chunks, first, strict=True))
        spans = list(chain.from_iterable(cut))
        if is_single:
            spans.sort(key=lambda span: span.captured == self._num_states)
        columns = np.array(spans, np.int32).T
        for field, own in zip(_Span._fields, columns, strict=True):
            getattr(inputs, f"span_{field}")[: len(spans)] = own

    def _write_tiles(self, inputs: StepInputs, lengths: Numbers, offsets: Numbers, width: int) -> Numbers:
        """Cuts chunks into tiles. Returns the tiles' rows."""
        counts = -(-lengths // width)
        rows = np.repeat(self._order[: len(counts)], counts)
        done = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * width
        inputs.tile_first[: len(rows)] = offsets[rows] + done
        inputs.tile_length[: len(rows)] = np.minimum(width, lengths[rows] - done)
        return rows


class _Span(NamedTuple):
    start: int
    length: int
    ended: int
    captured: int


def _spans(chunk: Chunk, first: int, none: int) -> Iterator[_Span]:
    """The spans of a chunk whose first token has this number in the step; `none` is a slot out of range."""
    at = 0
    for offset, slot in chunk.captures:
        yield _Span(first + at, offset - at, chunk.state if offset == chunk.length else none, slot)
        at = offset
    if at < chunk.length:
        yield _Span(first + at, chunk.length - at, chunk.state, none)


def _tokens(chunk: Chunk, reference: Callable[[int], int]) -> list[int]:
    ids = chunk.seq.token_ids[chunk.start : chunk.end]
    if ids[-1] == PENDING:
        ids[-1] = reference(chunk.seq.id)
    return ids

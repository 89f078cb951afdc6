"""A step's integers, as its program reads them and as a batch fills them in. Works on all tokens at once: a loop over
hundreds of sequences would take longer than the device does.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.engine.batch import Chunk
from ostro.engine.sequence import PENDING
from ostro.runner.jax.shapes import Sizes, StepShape
from ostro.runner.page_rows import PageRows

Ints = npt.NDArray[np.int32]


class StepInputs(NamedTuple):
    """A step's integers. They travel as one array, because each argument makes launching a program slower."""

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
    table: Any
    """[rows, pages]"""

    @classmethod
    def cut(cls, integers: Any, shape: StepShape) -> "StepInputs":
        """Views of the parts of one array; works on numpy's and JAX's."""
        ends = list(accumulate(shape.sizes))
        parts = cls(*(integers[end - size : end] for end, size in zip(ends, shape.sizes, strict=True)))
        return parts._replace(table=parts.table.reshape(shape.rows, shape.pages))

    @classmethod
    def padding(cls, shape: StepShape, num_slots: int) -> tuple[Ints, "StepInputs"]:
        """An array for a step without tokens, and views of its parts to fill in."""
        integers = np.zeros(shape.num_integers, np.int32)
        parts = cls.cut(integers, shape)
        parts.slots[:] = num_slots
        parts.tile_first[:] = shape.tokens
        return integers, parts


class InputWriter:
    """Writes batches into arrays. Holds the page table, of which little changes from step to step."""

    def __init__(self, sizes: Sizes, shapes: Sequence[StepShape]) -> None:
        self._page_size, self._num_slots = sizes.page_size, sizes.num_pages * sizes.page_size
        self._table = np.zeros((shapes[-1].rows, shapes[-1].pages), np.int32)
        self._held = PageRows(*self._table.shape)

    def write(self, chunks: Sequence[Chunk], shape: StepShape, reference: Callable[[int], int]) -> Ints:
        """`reference` gives what stands for a sequence's token that is still on the device."""
        integers, inputs = StepInputs.padding(shape, self._num_slots)
        inputs.table[:] = self._updated(chunks)[: shape.rows]
        lengths = np.array([chunk.length for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        offsets = np.cumsum(lengths) - lengths
        tokens = [token for chunk in chunks for token in _tokens(chunk, reference)]
        own, rows = len(tokens), np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(own) + (starts - offsets)[rows]
        inputs.tokens[:own] = tokens
        inputs.positions[:own] = positions
        inputs.slots[:own] = (
            self._table[rows, positions // self._page_size] * self._page_size + positions % self._page_size
        )
        self._write_tiles(inputs, lengths, offsets, shape.width)
        asked = (offsets + lengths - 1)[[bool(chunk.samples) for chunk in chunks]]
        inputs.asked[: len(asked)] = asked
        return integers

    def _updated(self, chunks: Sequence[Chunk]) -> Ints:
        cells, pages = self._held.update([chunk.seq.pages for chunk in chunks])
        self._table.reshape(-1)[cells] = pages
        return self._table

    @staticmethod
    def _write_tiles(inputs: "StepInputs", lengths: Ints, offsets: npt.NDArray[np.int64], width: int) -> None:
        counts = -(-lengths // width)
        rows = np.repeat(np.arange(len(counts)), counts)
        done = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) * width
        inputs.tile_first[: len(rows)] = offsets[rows] + done
        inputs.tile_length[: len(rows)] = np.minimum(width, lengths[rows] - done)
        inputs.tile_row[: len(rows)] = rows


def _tokens(chunk: Chunk, reference: Callable[[int], int]) -> list[int]:
    ids = chunk.seq.token_ids[chunk.start : chunk.end]
    if ids[-1] == PENDING:
        ids[-1] = reference(chunk.seq.id)
    return ids

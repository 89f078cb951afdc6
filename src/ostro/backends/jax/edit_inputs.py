"""Changes of scores as arrays of fixed sizes, as a draw's program reads them and as sequences fill them in. Imports no
JAX.

Biases, penalties and bans are cells: a row, a token and an amount. A structured output is a mask, a bit per token.
Penalties also count the pending token, which is still on the device: a cell has a second amount for the case that it
is the pending one.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.backends.sampling.edits import Change, cuts, edits_without_penalties, occurrence_penalties
from ostro.engine.sequence import Sequence

WORD_BITS = 32
NOBODY = 1 << 30
"""Stands for no pending token: larger than any vocabulary."""
_FEWEST_CELLS = 4096
_CELLS_PER_ROW = 256

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class CellKind(IntEnum):
    """What a cell does to a score, in the order in which it is done; ADD and SUBTRACT as in `Change`."""

    PADDING = 0
    ADD = 1
    DISCOURAGE = 2
    OCCURRENCE = 3
    """Subtracts; the pending token counts as a further occurrence."""
    SUBTRACT = 4


_KINDS = {Change.ADD: CellKind.ADD, Change.SUBTRACT: CellKind.SUBTRACT}


def num_cells(rows: int) -> int:
    """The number of cells that a draw of `rows` rows has room for."""
    return max(_FEWEST_CELLS, rows * _CELLS_PER_ROW)


class EditInputs(NamedTuple):
    """A draw's changes, except masks. They travel as two arrays, because each argument makes launching slower."""

    row: Any
    token: Any
    kind: Any
    pending: Any
    """Per row: the token that the step before this one drew for it, or -1 - its row there; NOBODY for none."""
    amount: Any
    amount_if_pending: Any
    """Used instead of `amount` if the token is the pending one."""
    repetition: Any
    """Per row, for the pending token: its repetition penalty, and its penalty if it has not occurred before."""
    occurrence: Any

    @staticmethod
    def sizes(rows: int) -> tuple[int, int]:
        """The sizes of both arrays: integers and floats."""
        cells = num_cells(rows)
        return 3 * cells + rows, 2 * cells + 2 * rows

    @classmethod
    def cut(cls, integers: Any, floats: Any, rows: int) -> "EditInputs":
        """Views of the parts of both arrays; works on numpy's and JAX's."""
        cells = num_cells(rows)
        return cls(
            *_parts(integers, (cells, cells, cells, rows)),
            *_parts(floats, (cells, cells, rows, rows)),
        )


def _parts(whole: Any, sizes: Seq[int]) -> Iterator[Any]:
    return (whole[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True))


class _Cells(NamedTuple):
    row: Any
    token: npt.NDArray[np.generic]
    kind: CellKind
    amount: Any
    amount_if_pending: Any


class PackedEdits(NamedTuple):
    """Arguments of a draw's program."""

    masks: npt.NDArray[np.uint32]
    """[rows, words]: a bit per token, set if it is allowed."""
    integers: Ints
    floats: Floats


def packed_edits(
    seqs: Seq[Sequence], reference: Callable[[int], int], *, rows: int, vocab: int, words: int
) -> PackedEdits | None:
    """The changes of each draw. None if a program cannot apply them: top-n-sigma, or too many.

    `reference` maps a sequence to the reference of its token that is still on the device.
    """
    if any(map(cuts, seqs)):
        return None
    found = [*_listed(seqs, vocab), *_penalties(seqs)]
    if sum(len(cells.token) for cells in found) > num_cells(rows):
        return None
    sizes = EditInputs.sizes(rows)
    packed = PackedEdits(_masks(seqs, rows, words), np.zeros(sizes[0], np.int32), np.zeros(sizes[1], np.float32))
    inputs = EditInputs.cut(packed.integers, packed.floats, rows)
    at = 0
    for cells in found:
        own = slice(at, at + len(cells.token))
        inputs.row[own], inputs.token[own], inputs.kind[own] = cells.row, cells.token, cells.kind
        inputs.amount[own], inputs.amount_if_pending[own] = cells.amount, cells.amount_if_pending
        at = own.stop
    inputs.pending[:] = NOBODY
    for row, seq in enumerate(seqs):
        if seq.num_pending:
            params = seq.request.params
            inputs.pending[row] = reference(seq.id)
            inputs.repetition[row], inputs.occurrence[row] = params.repetition_penalty, occurrence_penalties(params, 1)
    return packed


def _masks(seqs: Seq[Sequence], rows: int, words: int) -> npt.NDArray[np.uint32]:
    masks = np.full((rows, words), 0xFFFFFFFF, np.uint32)
    for row, seq in enumerate(seqs):
        if seq.mask is not None:
            own = np.frombuffer(seq.mask, np.uint8)[: masks.shape[1] * masks.itemsize]
            masks[row] = 0
            masks[row].view(np.uint8)[: len(own)] = own
    return masks


def _listed(seqs: Seq[Sequence], vocab: int) -> Iterator[_Cells]:
    """Biases and bans, which do not depend on the pending token: sequences that ban a word of several wait for it."""
    for change, (row, token, amount) in edits_without_penalties(seqs, vocab):
        yield _Cells(row, token, _KINDS[change], amount, amount)


def _penalties(seqs: Seq[Sequence]) -> Iterator[_Cells]:
    """Penalties for the tokens that the host knows."""
    for row, seq in enumerate(seqs):
        params, known = seq.request.params, seq.token_ids[: seq.num_known]
        if (penalty := params.repetition_penalty) != 1.0:
            yield _Cells(row, np.unique(known), CellKind.DISCOURAGE, penalty, penalty)
        if params.presence_penalty or params.frequency_penalty:
            tokens, counts = np.unique(known[seq.num_prompt :], return_counts=True)
            amounts = (occurrence_penalties(params, counts + more) for more in (0, 1))
            yield _Cells(row, tokens, CellKind.OCCURRENCE, *amounts)

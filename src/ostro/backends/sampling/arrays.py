"""Numpy twins of torch's sampling: changes of scores, and log-probabilities of a row of logits. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from ostro.backends.sampling.edits import Change, all_edits, cuts, sigma_rows
from ostro.engine.runner import TokenLogprob
from ostro.engine.sequence import Sequence

Floats = npt.NDArray[np.float32]


Row = tuple[int, Sequence]
"""A row of logits, and a sequence that wants a token from it."""


def is_edited(seq: Sequence) -> bool:
    """Whether scores are changed before the sequence's next token is drawn."""
    request, params = seq.request, seq.request.params
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or request.bad_word_ids
        or seq.stops_banned
        or cuts(seq)
    )


def edit(logits: Floats, rows: Seq[Row]) -> None:
    """Applies the sequences' changes to their rows of `logits`, in place."""
    # The choices of one request draw their first tokens from one row, with the same changes.
    seqs = dict(rows)
    numbers = np.array(list(seqs), np.intp)
    with np.errstate(invalid="ignore", over="ignore"):
        for change, cells in all_edits(list(seqs.values()), logits.shape[-1]):
            index = (numbers[cells[0].astype(np.intp)], cells[1].astype(np.intp))
            logits[index] = _CHANGES[change](logits[index], cells[2].astype(np.float32))
        wanting = list(seqs.values())
        for row, kept in zip(*sigma_rows(wanting), strict=True):
            mask(logits[numbers[row]], wanting[row].mask)
            _cut(logits[numbers[row]], kept)


def mask(scores: Floats, allowed_bits: memoryview | None) -> None:
    """Bans the tokens that a bit mask does not allow, in place. None allows all."""
    if allowed_bits is not None:
        allowed = np.unpackbits(np.frombuffer(allowed_bits, np.uint8), count=len(scores), bitorder="little")
        scores[allowed == 0] -= np.inf


def _cut(scores: Floats, deviations: float) -> None:
    exact = scores.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    if len(finite):
        scores[exact < exact.max() - deviations * finite.std()] = -np.inf


def _discourage(scores: Floats, penalty: Floats) -> Floats:
    return np.where(scores > 0, scores / penalty, scores * penalty)


_CHANGES: Mapping[Change, Callable[[Floats, Floats], npt.NDArray[np.float32]]] = {
    Change.ADD: np.add,
    Change.DISCOURAGE: _discourage,
    Change.SUBTRACT: np.subtract,
}

# Avoids sorting a whole row for its few largest values: the blocks' maxima give a lower bound for them.
_BLOCK = 128


def token_logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    """The log-probability of a token under one row of logits, and the `top` most likely tokens."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Never above zero. Ranks and probabilities both derive from these, so they agree.
        below = logits - logits.max()
        log_total = math.log(np.exp(below).sum(dtype=np.float64))
        own = below[token]
        best = [(int(each), float(below[each]) - log_total) for each in _largest(below, top)] if top else []
        return TokenLogprob(token, float(own) - log_total, int(np.count_nonzero(below > own)) + 1, tuple(best))


def _largest(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Indices of the largest values, largest first; ties go to the lower index."""
    whole = len(values) // _BLOCK * _BLOCK
    # Each of the `count` blocks with the largest maxima has a value at least as large as the smallest such maximum.
    blocks = values[:whole].reshape(-1, _BLOCK).max(axis=1)
    candidates = np.arange(len(values))
    if len(blocks) > count:
        candidates = np.flatnonzero(values >= np.partition(blocks, -count)[-count])
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]

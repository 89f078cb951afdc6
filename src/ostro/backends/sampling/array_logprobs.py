"""Log-probabilities in numpy, one position at a time; the twin of `backends.sampling.logprobs` in torch."""

import math

import numpy as np
import numpy.typing as npt

from ostro.engine.runner import TokenLogprob

Floats = npt.NDArray[np.float32]

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

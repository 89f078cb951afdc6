"""Log-probabilities in numpy, a position at a time: what `runner.logprobs` computes with torch."""

import math

import numpy as np
import numpy.typing as npt

from ostro.engine.runner import TokenLogprob
from ostro.kernels.cpu.packed_file import Floats

# A whole row is not sorted for its few largest numbers: those of blocks tell how large they are at least.
_BLOCK = 128


def token_logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    """The log-probability of a token under one row of logits, and the `top` most likely tokens."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Never above zero. Ranks and probabilities come from these alone, so that they agree.
        below = logits - logits.max()
        log_total = math.log(np.exp(below).sum(dtype=np.float64))
        own = below[token]
        best = [(int(each), float(below[each]) - log_total) for each in _largest(below, top)] if top else []
        return TokenLogprob(token, float(own) - log_total, int(np.count_nonzero(below > own)) + 1, tuple(best))


def _largest(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Where the largest numbers stand, largest first; equal ones by lower index."""
    whole = len(values) // _BLOCK * _BLOCK
    # As many blocks as numbers are wanted: each has one that is no smaller than the least of their largest.
    blocks = values[:whole].reshape(-1, _BLOCK).max(axis=1)
    candidates = np.arange(len(values))
    if len(blocks) > count:
        candidates = np.flatnonzero(values >= np.partition(blocks, -count)[-count])
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]

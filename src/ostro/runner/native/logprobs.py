"""Log-probabilities in numpy, a position at a time: what `runner.logprobs` computes with torch."""

import math

import numpy as np
import numpy.typing as npt

from ostro.engine.runner import TokenLogprob
from ostro.kernels.cpu.packed_file import Floats


def token_logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    """The log-probability of a token under one row of logits, and the `top` most likely tokens."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Adding 0 makes a best logit of -0.0 into 0.0.
        gaps = (logits.max() + np.float32(0)) - logits
        log_total = math.log(np.exp(-gaps).sum(dtype=np.float64))
        gap = gaps[token]
        best = [(int(each), -(float(gaps[each]) + log_total)) for each in _smallest(gaps, top)] if top else []
        return TokenLogprob(token, -(float(gap) + log_total), int(np.count_nonzero(gaps < gap)) + 1, tuple(best))


def _smallest(gaps: Floats, count: int) -> npt.NDArray[np.intp]:
    """Where the smallest gaps stand, smallest first; equal ones by lower index."""
    count = min(count, len(gaps))
    # All that are no larger than the last of them: a partition alone would choose among equals at will.
    last = np.partition(gaps, count - 1)[count - 1]
    candidates = np.flatnonzero(gaps <= last)
    return candidates[np.argsort(gaps[candidates], kind="stable")[:count]]

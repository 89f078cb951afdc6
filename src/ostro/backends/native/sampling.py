"""Sampling around the native core's draws: what is changed in rows before, and how each draw is described.

    logits ── bias, penalties, bans, top-n-sigma (numpy, in place) ── mask, temperature, truncation, draw (native)

`backends.sampling.sampler` says what each setting means: both give the same tokens for the same seed.
"""

from collections.abc import Sequence as Seq
from ctypes import Array

import numpy as np

from ostro.backends.sampling.array_edits import Row
from ostro.backends.sampling.honoured import check_honoured
from ostro.backends.sampling.random_key import stream_key
from ostro.kernels.cpu.library import CDraw

_WORD = 2**64 - 1

DRAWN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Fields of SamplingParams that the native draw honours."""

check_honoured("the native core", DRAWN)


def draws_of(rows: Seq[Row], vocab: int) -> "Array[CDraw]":
    draws = (CDraw * len(rows))()
    for draw, (row, seq) in zip(draws, rows, strict=True):
        params = seq.request.params
        draw.row = row
        if seq.mask is not None:
            words = np.frombuffer(seq.mask, np.uint32)
            draw.allowed, draw.num_words = words.ctypes.data, len(words)
        if params.greedy:
            continue
        draw.temperature, draw.top_p, draw.min_p = params.temperature, params.top_p, params.min_p
        draw.top_k = params.top_k if 0 < params.top_k < vocab else 0
        draw.key = stream_key(seq.request.seed, seq.choice, seq.num_output) & _WORD
    return draws

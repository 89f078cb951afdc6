"""Sampling around the native core's draws: what is changed in rows before, and how each draw is described.

    logits ── bias, penalties, bans, top-n-sigma (numpy, in place) ── mask, temperature, truncation, draw (native)

`runner.sampler` says what each setting means: both give the same tokens for the same seed.
"""

from collections.abc import Sequence as Seq
from ctypes import Array
from dataclasses import fields

import numpy as np

from ostro.kernels.cpu.library import CDraw
from ostro.runner.array_edits import Row
from ostro.runner.random_key import stream_key
from ostro.sampling_params import SamplingParams

_WORD = 2**64 - 1

# Every field of SamplingParams stands in one of these: what is in none would be ignored in silence.
DRAWN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Honoured by the native draw."""
EDITED = frozenset(
    {
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
        "min_tokens",
        "top_n_sigma",
    }
)
"""Honoured by changing scores before the draw."""
READ = frozenset({"logprobs", "prompt_logprobs"})
"""Honoured by reading logits."""
ELSEWHERE = frozenset(
    {
        "n",
        "max_tokens",
        "default_max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "truncate_prompt_tokens",
        "skip_special_tokens",
        "include_stop_in_output",
        "structured",
        "unset",
    }
)
"""Honoured by the engine and by whoever makes text of tokens."""

_unknown = {each.name for each in fields(SamplingParams)} - (DRAWN | EDITED | READ | ELSEWHERE)
assert not _unknown, f"the native core would ignore {_unknown}: say in {__name__} who honours them"


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

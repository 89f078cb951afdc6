"""Sampling around the native core's draws: what is changed in rows before, and how each draw is described.

    logits ── bias, penalties, bans, top-n-sigma (numpy, in place) ── mask, temperature, truncation, draw (native)

`runner.sampler` says what each setting means: both give the same tokens for the same seed.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from ctypes import Array
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from ostro.engine.sequence import Sequence
from ostro.kernels.cpu.library import CDraw
from ostro.kernels.cpu.packed_file import Floats
from ostro.runner.edits import Change, all_edits, cuts, sigma_rows
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

Row = tuple[int, Sequence]
"""A row of logits, and a sequence that wants a token from it."""


def is_edited(seq: Sequence) -> bool:
    """Whether scores are changed before the sequence's next token is drawn: any field of EDITED."""
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
    """Changes the rows of `logits`, in place, as their sequences ask for."""
    # The choices of one request draw their first tokens from one row, and ask for the same.
    seqs = dict(rows)
    numbers = np.array(list(seqs), np.intp)
    with np.errstate(invalid="ignore", over="ignore"):
        for change, cells in all_edits(list(seqs.values()), logits.shape[-1]):
            index = (numbers[cells[0].astype(np.intp)], cells[1].astype(np.intp))
            logits[index] = _CHANGES[change](logits[index], cells[2].astype(np.float32))
        wanting = list(seqs.values())
        for row, kept in zip(*sigma_rows(wanting), strict=True):
            _mask(logits[numbers[row]], wanting[row].mask)
            _cut(logits[numbers[row]], kept)


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


def _mask(scores: Floats, mask: memoryview | None) -> None:
    """What top-n-sigma is not to count; the draw masks all others itself."""
    if mask is not None:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(scores), bitorder="little")
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

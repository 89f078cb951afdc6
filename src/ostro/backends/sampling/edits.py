"""Changes that a request makes to its scores before a token is chosen: logit bias, penalties, bans, top-n-sigma.
Imports no torch.

All but the last affect a few tokens per row, so each is a list of cells (row, token, amount) gathered for the whole
batch, to be applied in one indexed write. Top-n-sigma affects whole rows.

Every field of SamplingParams is honoured by the edits, the draw or the scheduler: a field that a sampler would ignore
in silence is an error when the sampler is imported.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.engine import sequence
from ostro.sampling_params import SamplingParams


class Change(Enum):
    """How an amount is applied to a score."""

    ADD = auto()
    DISCOURAGE = auto()
    """Divides a positive score, multiplies any other."""
    SUBTRACT = auto()


class Edits(NamedTuple):
    change: Change
    cells: npt.NDArray[np.float64]
    """[3, cells]: rows, tokens and amounts; all floats, so that one array transfers them to the device."""


class _Edit(NamedTuple):
    row: int
    tokens: npt.NDArray[np.float64]
    """A token may repeat only with the same amount."""
    amounts: npt.NDArray[np.float64]


def all_edits(seqs: Sequence[sequence.Sequence], vocab: int) -> Iterator[Edits]:
    """Logit bias, repetition penalty, presence and frequency penalties, then bans, to be applied in that order.

    A ban subtracts infinity rather than assigning it: NaN or infinite scores then stay visible to the check that
    fails their row.
    """
    yield from _gathered(Change.ADD, _biases(seqs, vocab))
    yield from _gathered(Change.DISCOURAGE, _repetitions(enumerate(seqs)))
    yield from _gathered(Change.SUBTRACT, _occurrences(enumerate(seqs)))
    yield from _gathered(Change.SUBTRACT, _bans(seqs, vocab))


def edits_without_penalties(seqs: Sequence[sequence.Sequence], vocab: int) -> Iterator[Edits]:
    """For a sampler that applies penalties itself, except to rows with top-n-sigma, which must come after penalties."""
    cut = [(row, seq) for row, seq in enumerate(seqs) if cuts(seq)]
    yield from _gathered(Change.ADD, _biases(seqs, vocab))
    yield from _gathered(Change.DISCOURAGE, _repetitions(cut))
    yield from _gathered(Change.SUBTRACT, _occurrences(cut))
    yield from _gathered(Change.SUBTRACT, _bans(seqs, vocab))


def occurrence_penalties(params: SamplingParams, counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The amounts to subtract from the scores of tokens that were generated `counts` times."""
    return params.presence_penalty + params.frequency_penalty * np.asarray(counts, np.float64)


def cuts(seq: sequence.Sequence) -> bool:
    """Whether the sequence uses top-n-sigma. It always keeps the best token, so it does nothing to greedy sampling."""
    params = seq.request.params
    return params.top_n_sigma > 0.0 and not params.greedy


def sigma_rows(seqs: Sequence[sequence.Sequence]) -> tuple[list[int], list[float]]:
    """The rows with top-n-sigma, and how many standard deviations each keeps.

    Applied after all other edits: tokens more than that many deviations below the best are dropped. The deviation is
    the population deviation of the finite scores, in double precision.
    """
    found = [(row, seq.request.params.top_n_sigma) for row, seq in enumerate(seqs) if cuts(seq)]
    return [row for row, _ in found], [kept for _, kept in found]


def _gathered(change: Change, edits: Iterable[_Edit]) -> Iterator[Edits]:
    """All rows' edits of one kind, merged; nothing if there are none."""
    if not (found := list(edits)):
        return
    lengths = [len(edit.tokens) for edit in found]
    cells = np.empty((3, sum(lengths)))
    cells[0] = np.repeat([edit.row for edit in found], lengths)
    cells[1] = np.concatenate([edit.tokens for edit in found])
    cells[2] = np.concatenate([edit.amounts for edit in found])
    yield Edits(change, cells)


# A bias or ban may name an id that the model lacks; it is skipped, as it cannot be generated anyway.


def _biases(seqs: Sequence[sequence.Sequence], vocab: int) -> Iterator[_Edit]:
    for row, seq in enumerate(seqs):
        if bias := {token: amount for token, amount in seq.request.params.logit_bias.items() if 0 <= token < vocab}:
            yield _Edit(row, _array(bias), _array(bias.values()))


def _repetitions(rows: Iterable[tuple[int, sequence.Sequence]]) -> Iterator[_Edit]:
    for row, seq in rows:
        if (penalty := seq.request.params.repetition_penalty) != 1.0:
            yield _Edit(row, np.array(seq.token_ids, dtype=np.float64), np.full(seq.num_tokens, penalty))


def _occurrences(rows: Iterable[tuple[int, sequence.Sequence]]) -> Iterator[_Edit]:
    for row, seq in rows:
        params = seq.request.params
        if (params.presence_penalty or params.frequency_penalty) and seq.num_output:
            tokens, counts = np.unique(np.array(seq.output_ids, dtype=np.float64), return_counts=True)
            yield _Edit(row, tokens, occurrence_penalties(params, counts))


def _bans(seqs: Sequence[sequence.Sequence], vocab: int) -> Iterator[_Edit]:
    for row, seq in enumerate(seqs):
        banned = {word[-1] for word in seq.request.bad_word_ids if _completes(word, seq.token_ids)}
        if seq.stops_banned:
            banned |= seq.stop_ids
        if banned := {token for token in banned if 0 <= token < vocab}:
            yield _Edit(row, _array(banned), np.full(len(banned), np.inf))


def _completes(word: tuple[int, ...], token_ids: list[int]) -> bool:
    """Whether the word's last token would complete it. Its start may be in the prompt."""
    if len(word) < 2:
        return len(word) == 1
    # Comparing just the last token rules out nearly every case.
    return token_ids[-1] == word[-2] and tuple(token_ids[1 - len(word) :]) == word[:-1]


def _array(values: Collection[float]) -> npt.NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64, count=len(values))


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
"""Honoured by changing scores before the draw: `backends.sampling.edits`."""
READ = frozenset({"logprobs", "prompt_logprobs"})
"""Honoured by reading logits: `backends.sampling.arrays`."""
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


def check_honoured(sampler: str, drawn: frozenset[str], params: type[SamplingParams] = SamplingParams) -> None:
    """Raises AssertionError for a field that is neither in `drawn`, which the sampler's draw honours, nor above."""
    unknown = {each.name for each in fields(params)} - (drawn | EDITED | READ | ELSEWHERE)
    assert not unknown, f"{sampler} would ignore {', '.join(sorted(unknown))}: say in {__name__} who honours them"

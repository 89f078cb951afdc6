"""What a request changes in its scores before a token is chosen: logit bias, penalties and bans.

Each touches a few tokens of a row, so each is a list of cells (row, token, amount), gathered on the host for the whole
batch and applied in one indexed write. Rows that ask for nothing cost nothing beyond one copy of the batch.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.engine import sequence


class _Edit(NamedTuple):
    row: int
    tokens: npt.NDArray[np.float64]
    """Ids; as floats, so that cells travel to the device as one array. A token may repeat only with one amount."""
    amounts: npt.NDArray[np.float64]


def edited(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """Scores after logit bias, repetition penalty, presence and frequency penalties, then bans, in that order.

    Returns `logits` itself where no row asks for any, else a changed copy. A ban subtracts infinity instead of writing
    it: a NaN or an infinite logit then stays visible to the check that fails its row.
    """
    vocab = logits.shape[-1]
    return _changed(
        logits,
        (torch.add, _biases(seqs, vocab)),
        (_discourage, _repetitions(seqs)),
        (torch.sub, _occurrences(seqs)),
        (torch.sub, _bans(seqs, vocab)),
    )


def without_penalties(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """Logit bias and bans only, for a sampler that knows penalties itself."""
    vocab = logits.shape[-1]
    return _changed(logits, (torch.add, _biases(seqs, vocab)), (torch.sub, _bans(seqs, vocab)))


def _changed(logits: Tensor, *passes: tuple[Callable[[Tensor, Tensor], Tensor], Iterable[_Edit]]) -> Tensor:
    scores = logits
    for change, edits in passes:
        if found := list(edits):
            scores = logits.clone() if scores is logits else scores
            _apply(scores, found, change)
    return scores


# A bias or a ban may name an id that the model does not have: it cannot be generated, so there is nothing to change.


def _biases(seqs: Sequence[sequence.Sequence], vocab: int) -> Iterator[_Edit]:
    for row, seq in enumerate(seqs):
        if bias := {token: amount for token, amount in seq.request.params.logit_bias.items() if 0 <= token < vocab}:
            yield _Edit(row, _array(bias), _array(bias.values()))


def _repetitions(seqs: Sequence[sequence.Sequence]) -> Iterator[_Edit]:
    for row, seq in enumerate(seqs):
        if (penalty := seq.request.params.repetition_penalty) != 1.0:
            yield _Edit(row, np.array(seq.token_ids, dtype=np.float64), np.full(seq.num_tokens, penalty))


def _occurrences(seqs: Sequence[sequence.Sequence]) -> Iterator[_Edit]:
    for row, seq in enumerate(seqs):
        params = seq.request.params
        if (params.presence_penalty or params.frequency_penalty) and seq.num_output:
            tokens, counts = np.unique(np.array(seq.output_ids, dtype=np.float64), return_counts=True)
            penalties = params.presence_penalty + params.frequency_penalty * counts
            yield _Edit(row, tokens, penalties.astype(np.float64))


def _bans(seqs: Sequence[sequence.Sequence], vocab: int) -> Iterator[_Edit]:
    for row, seq in enumerate(seqs):
        banned = {word[-1] for word in seq.request.bad_word_ids if _completes(word, seq.token_ids)}
        if seq.stops_banned:
            banned |= seq.stop_ids
        if banned := {token for token in banned if 0 <= token < vocab}:
            yield _Edit(row, _array(banned), np.full(len(banned), np.inf))


def _completes(word: tuple[int, ...], token_ids: list[int]) -> bool:
    """Whether the word's last token would complete it. Its beginning may lie in the prompt."""
    if len(word) < 2:
        return len(word) == 1
    # The last token alone settles it nearly always.
    return token_ids[-1] == word[-2] and tuple(token_ids[1 - len(word) :]) == word[:-1]


def _discourage(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores > 0, scores / penalty, scores * penalty)


def _apply(scores: Tensor, edits: list[_Edit], change: Callable[[Tensor, Tensor], Tensor]) -> None:
    lengths = [len(edit.tokens) for edit in edits]
    cells = np.empty((3, sum(lengths)))
    cells[0] = np.repeat([edit.row for edit in edits], lengths)
    cells[1] = np.concatenate([edit.tokens for edit in edits])
    cells[2] = np.concatenate([edit.amounts for edit in edits])
    rows, tokens, amounts = torch.from_numpy(cells).to(scores.device, non_blocking=True)
    index = (rows.long(), tokens.long())
    scores[index] = change(scores[index], amounts.to(scores.dtype))


def _array(values: Collection[float]) -> npt.NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64, count=len(values))

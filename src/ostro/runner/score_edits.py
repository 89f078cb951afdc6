"""Scores after logit bias, penalties and bans, as torch's tensors. What is changed is for `edits` to say."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ostro.engine import sequence
from ostro.runner.edits import Change, Edits, all_edits, edits_without_penalties


def edited(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """Returns `logits` itself where no row asks for a change, else a changed copy."""
    return _changed(logits, all_edits(seqs, logits.shape[-1]))


def without_penalties(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    return _changed(logits, edits_without_penalties(seqs, logits.shape[-1]))


def _changed(logits: Tensor, edits: Iterable[Edits]) -> Tensor:
    scores = logits
    for change, cells in edits:
        scores = logits.clone() if scores is logits else scores
        rows, tokens, amounts = torch.from_numpy(cells).to(scores.device, non_blocking=True)
        index = (rows.long(), tokens.long())
        scores[index] = _CHANGES[change](scores[index], amounts.to(scores.dtype))
    return scores


def _discourage(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores > 0, scores / penalty, scores * penalty)


_CHANGES: Mapping[Change, Callable[[Tensor, Tensor], Tensor]] = {
    Change.ADD: torch.add,
    Change.DISCOURAGE: _discourage,
    Change.SUBTRACT: torch.sub,
}

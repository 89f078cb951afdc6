"""Applies the changes listed by `edits` to torch scores: logit bias, penalties, bans and top-n-sigma."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ostro.engine import sequence
from ostro.runner.edits import Change, Edits, all_edits, edits_without_penalties, sigma_rows


def edited(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """Returns `logits` itself if no row needs a change, otherwise a modified copy."""
    return _cut(_changed(logits, all_edits(seqs, logits.shape[-1])), seqs)


def without_penalties(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """The same, except for penalties that the sampler applies from its own tables."""
    return _cut(_changed(logits, edits_without_penalties(seqs, logits.shape[-1])), seqs)


def _changed(logits: Tensor, edits: Iterable[Edits]) -> Tensor:
    scores = logits
    for change, cells in edits:
        scores = logits.clone() if scores is logits else scores
        rows, tokens, amounts = torch.from_numpy(cells).to(scores.device, non_blocking=True)
        index = (rows.long(), tokens.long())
        scores[index] = _CHANGES[change](scores[index], amounts.to(scores.dtype))
    return scores


def _cut(scores: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    rows, kept = sigma_rows(seqs)
    if not rows:
        return scores
    index = torch.tensor(rows).to(scores.device, non_blocking=True)
    exact = scores[index].double()
    is_finite = exact.isfinite()
    count = is_finite.sum(dim=-1, keepdim=True)
    mean = exact.where(is_finite, 0.0).sum(dim=-1, keepdim=True) / count
    variance = (exact - mean).where(is_finite, 0.0).square().sum(dim=-1, keepdim=True) / count
    deviations = torch.tensor(kept, dtype=torch.float64).to(scores.device, non_blocking=True).unsqueeze(-1)
    dropped = exact < exact.amax(dim=-1, keepdim=True) - deviations * variance.sqrt()
    return scores.index_copy(0, index, scores[index].masked_fill(dropped, -torch.inf))


def _discourage(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores > 0, scores / penalty, scores * penalty)


_CHANGES: Mapping[Change, Callable[[Tensor, Tensor], Tensor]] = {
    Change.ADD: torch.add,
    Change.DISCOURAGE: _discourage,
    Change.SUBTRACT: torch.sub,
}

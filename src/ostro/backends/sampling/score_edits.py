"""Applies the changes listed by `edits` to torch scores: logit bias, penalties, bans, masks and top-n-sigma."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ostro.backends.sampling.edits import Change, Edits, all_edits, edits_without_penalties, sigma_rows
from ostro.engine import sequence

_WORD_BITS = 32


def edited(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """Returns `logits` itself if no row needs a change, otherwise a modified copy."""
    return _cut(_masked(_changed(logits, all_edits(seqs, logits.shape[-1])), seqs), seqs)


def without_penalties(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    """The same, except for penalties that the sampler applies from its own tables."""
    return _cut(_masked(_changed(logits, edits_without_penalties(seqs, logits.shape[-1])), seqs), seqs)


def _changed(logits: Tensor, edits: Iterable[Edits]) -> Tensor:
    scores = logits
    for change, cells in edits:
        scores = logits.clone() if scores is logits else scores
        rows, tokens, amounts = torch.from_numpy(cells).to(scores.device, non_blocking=True)
        index = (rows.long(), tokens.long())
        scores[index] = _CHANGES[change](scores[index], amounts.to(scores.dtype))
    return scores


def _masked(scores: Tensor, seqs: Sequence[sequence.Sequence]) -> Tensor:
    # While a token is pending, the mask for the next one is not known.
    masks = {row: seq.mask for row, seq in enumerate(seqs) if seq.mask is not None and not seq.num_pending}
    if not masks:
        return scores
    index = torch.tensor(list(masks)).to(scores.device, non_blocking=True)
    words = torch.from_numpy(np.stack([np.frombuffer(mask, np.int32) for mask in masks.values()]))
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=scores.device)
    banned = (words.to(scores.device, non_blocking=True).unsqueeze(-1) >> bits & 1 == 0).flatten(1)
    # Infinity is subtracted, not written: NaN or an infinite score stays visible to the check that fails its row.
    own = scores[index]
    return scores.index_copy(0, index, torch.where(banned[:, : own.shape[-1]], own - torch.inf, own))


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

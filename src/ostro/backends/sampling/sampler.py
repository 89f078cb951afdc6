"""Logits to tokens: one token per sequence, each row with its own settings. Keeps no state between steps.

    logits ── edits, masks (`score_edits`) ── greedy: the best
       │                                   └─ gaps / temperature ── top-k ── top-p ── min-p ── draw
       └── log-probabilities: of the logits as the model gave them

A step's rows are grouped by what they need, and only those rows pay for it:

    greedy    the best score, lower id first
    whole     temperature, perhaps min-p: a draw over the vocabulary, nothing is sorted
    top-k     a draw over the k best
    nucleus   top-p without top-k: the same over the best few hundred; all are sorted only where those do not suffice

However the kept tokens were found, they are drawn from in id order: a draw depends on which tokens are kept and on
their weights, not on the group.

Tokens rank by score, equal scores by lower id, and top-k keeps exactly k. Top-p keeps the shortest beginning of the
ranking that holds at least the share p of what top-k left. Min-p keeps tokens at least min_p times as likely as the
best. Each keeps a beginning of the ranking, so the strictest one decides.

The rows of one batch do not influence each other: a row's token depends on its logits, its settings and its position.
The logits themselves differ in their last digits between a row computed alone and in a batch; the draw does not magnify
that (see `distribution`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ostro.backends.outcome import outcome
from ostro.backends.sampling.distribution import by_id, draw, gaps_below, ranked, total, weigh
from ostro.backends.sampling.logprobs import logprob_table, position_logprobs, read_logprobs, where_doubles_are
from ostro.backends.sampling.random_stream import stream_key
from ostro.backends.sampling.score_edits import edited
from ostro.engine import sequence
from ostro.engine.runner import SampledToken, TokenLogprob

__all__ = ["position_logprobs", "sample"]

_NUCLEUS_CANDIDATES = 512
"""Holds a top-p nucleus nearly always, and takes a twentieth of the time of sorting the vocabulary."""


def sample(logits: Tensor, seqs: Sequence[sequence.Sequence]) -> list[SampledToken]:
    """The next token of each sequence; row i of `logits` (fp32, left unchanged) belongs to seqs[i].

    A row from which nothing can be drawn returns an error in its place.
    """
    logits = where_doubles_are(logits)
    scores = edited(logits, seqs)
    peaks, tokens = scores.max(dim=-1)
    for method, rows in _groups(seqs, vocab=scores.shape[-1]).items():
        index = _index(rows, scores)
        settings = _Settings.of([seqs[row] for row in rows], scores)
        tokens[index] = method(gaps_below(peaks[index], scores[index]), settings)
    logprobs = _chosen_logprobs(logits, tokens, seqs)
    token_ids, best = torch.stack((tokens.double(), peaks.double())).tolist()
    return [outcome(int(token_ids[row]), best[row], logprobs.get(row)) for row in range(len(seqs))]


@dataclass(frozen=True, slots=True)
class _Settings:
    """The drawn rows' settings: one tensor per setting, one entry per row."""

    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    largest_top_k: int
    """Known on the host: reading it back from the device would wait for the model."""

    @classmethod
    def of(cls, seqs: Sequence[sequence.Sequence], scores: Tensor) -> Self:
        table = np.empty((5, len(seqs)))
        # A key's 64 bits travel unchanged: a float would round them.
        keys = table[0].view(np.int64)
        largest_top_k = 0
        for row, seq in enumerate(seqs):
            params = seq.request.params
            keys[row] = stream_key(seq.request.seed, seq.choice, seq.num_output)
            # Any integer is a legal top_k; not every integer is a float.
            top_k = min(params.top_k, scores.shape[-1])
            largest_top_k = max(largest_top_k, top_k)
            table[1:, row] = params.temperature, top_k, params.top_p, params.min_p
        # One transfer, and it does not wait for the model, which may still be running on the device.
        bits, temperatures, top_ks, top_ps, min_ps = torch.from_numpy(table).to(scores.device, non_blocking=True)
        dtype = scores.dtype
        streams = bits.view(torch.int64)
        return cls(streams, temperatures.to(dtype), top_ks.long(), top_ps, min_ps.to(dtype), largest_top_k)

    def select(self, rows: Tensor) -> Self:
        return replace(
            self,
            keys=self.keys[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


_Method = Callable[[Tensor, _Settings], Tensor]


def _groups(seqs: Sequence[sequence.Sequence], vocab: int) -> dict[_Method, list[int]]:
    """Which rows are drawn by which method. Greedy rows are in none."""
    groups: dict[_Method, list[int]] = {}
    for row, seq in enumerate(seqs):
        params = seq.request.params
        if params.greedy:
            continue
        if 0 < params.top_k < vocab:
            method = _draw_top_k
        elif params.top_p < 1.0:
            method = _draw_nucleus
        else:
            method = _draw_min_p if params.min_p else _draw_whole
        groups.setdefault(method, []).append(row)
    return groups


def _index(rows: list[int], scores: Tensor) -> Tensor | slice:
    # A slice is a view: a batch whose rows all use one method is not copied.
    return slice(None) if len(rows) == len(scores) else torch.tensor(rows).to(scores.device, non_blocking=True)


def _draw_whole(gaps: Tensor, settings: _Settings) -> Tensor:
    return draw(weigh(gaps, settings.temperature), settings.keys)


def _draw_min_p(gaps: Tensor, settings: _Settings) -> Tensor:
    weights = weigh(gaps, settings.temperature)
    weights.masked_fill_(weights < settings.min_p.unsqueeze(-1), 0.0)
    return draw(weights, settings.keys)


def _draw_top_k(gaps: Tensor, settings: _Settings) -> Tensor:
    best, ids = ranked(gaps, settings.largest_top_k)
    weights = weigh(best, settings.temperature)
    # Tokens beyond a row's own k must not count towards the total that top-p takes a share of.
    weights *= torch.arange(weights.shape[-1], device=weights.device) < settings.top_k.unsqueeze(-1)
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    kept = _cut(weights, ends, settings.top_p * ends[:, -1], settings.min_p)
    return draw(by_id(kept, ids, vocab=gaps.shape[-1]), settings.keys)


def _draw_nucleus(gaps: Tensor, settings: _Settings) -> Tensor:
    """Tries the most likely candidates; rows whose nucleus is wider are sorted whole."""
    vocab = gaps.shape[-1]
    share = settings.top_p * total(weigh(gaps, settings.temperature))
    tokens, wider = _draw_candidates(gaps, min(_NUCLEUS_CANDIDATES, vocab), share, settings)
    wide = wider.nonzero().squeeze(-1)
    if len(wide):
        tokens[wide], _ = _draw_candidates(gaps[wide], vocab, share[wide], settings.select(wide))
    return tokens


def _draw_candidates(gaps: Tensor, count: int, share: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Tokens drawn from the nuclei that hold `share`, and the rows for which `count` candidates are too few."""
    best, ids = ranked(gaps, count)
    weights = weigh(best, settings.temperature)
    ends = weights.cumsum(dim=-1, dtype=torch.float64)
    kept = _cut(weights, ends, share, settings.min_p)
    return draw(by_id(kept, ids, vocab=gaps.shape[-1]), settings.keys), ends[:, -1] < share


def _cut(weights: Tensor, ends: Tensor, share: Tensor, min_p: Tensor) -> Tensor:
    """Ranked weights, zero where top-p or min-p drops them. `ends` are their running sums, `share` is what to keep."""
    needed = (ends < share.unsqueeze(-1)).sum(dim=-1, keepdim=True)
    kept = torch.arange(weights.shape[-1], device=weights.device) <= needed
    kept &= weights >= min_p.unsqueeze(-1)
    return weights * kept


def _chosen_logprobs(logits: Tensor, tokens: Tensor, seqs: Sequence[sequence.Sequence]) -> dict[int, TokenLogprob]:
    asked = {row: top for row, seq in enumerate(seqs) if (top := seq.request.params.logprobs) is not None}
    if not asked:
        return {}
    index = _index(list(asked), logits)
    table = logprob_table(logits[index], tokens[index], max(asked.values()))
    return dict(zip(asked, read_logprobs(table, list(asked.values())), strict=True))

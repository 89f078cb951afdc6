"""Log-probabilities under the model's own distribution. Knows logits, not how tokens are chosen from them.

All numbers of a position derive from one tensor of gaps below its best logit, so a token's log-probability equals the
highest one listed exactly when its rank is 1.
"""

import torch
from torch import Tensor

from ostro.backends.sampling.distribution import gaps_below, ranked, total, weigh
from ostro.engine.runner import TokenLogprob

_TOKEN, _LOGPROB, _RANK, _TOP = range(4)
# Weights are already rounded to fp32; fp32 sums of a hundred of them add no more error than that.
_SUMMED_WIDE = 2048


def position_logprobs(logits: Tensor, targets: list[int], top: int) -> list[TokenLogprob]:
    """Row i of `logits` predicts targets[i]. Needs several times the memory of `logits`: pass blocks of rows."""
    logits = where_doubles_are(logits)
    chosen = torch.tensor(targets, dtype=torch.int64).to(logits.device, non_blocking=True)
    return read_logprobs(logprob_table(logits, chosen, top), [top] * len(targets))


def where_doubles_are(logits: Tensor) -> Tensor:
    """The logits on a device with float64, which Apple's GPUs lack: their logits go to the CPU, which shares their
    memory.
    """
    return logits.cpu() if logits.device.type == "mps" else logits


def logprob_table(logits: Tensor, chosen: Tensor, top: int) -> Tensor:
    """A float64 row per position, so that one transfer suffices: token, logprob, rank, `top` ids, their logprobs."""
    gaps = gaps_below(logits.amax(dim=-1), logits)
    weights = weigh(gaps, gaps.new_ones(len(gaps)))
    # On a GPU, the order of a plain sum depends on the number of rows.
    log_total = (total(weights) if weights.device.type == "cpu" else folded(weights)).log().unsqueeze(-1)
    tokens = chosen.unsqueeze(-1)
    gap = gaps.gather(1, tokens)
    rank = (gaps < gap).count_nonzero(dim=-1).unsqueeze(-1) + 1
    columns = [tokens.double(), -(gap + log_total), rank.double()]
    if top:
        top_gaps, top_ids = ranked(gaps, min(top, gaps.shape[-1]))
        columns += [top_ids.double(), -(top_gaps + log_total)]
    return torch.cat(columns, dim=-1)


def folded(weights: Tensor) -> Tensor:
    """Each row's sum, in float64, by repeatedly adding the second half to the first. Overwrites the weights."""
    while (width := weights.shape[-1]) > 1:
        if width <= _SUMMED_WIDE:
            weights = weights.double()
        half = -(-width // 2)
        weights[:, : width - half] += weights[:, half:]
        weights = weights[:, :half]
    return weights[:, 0].double()


def read_logprobs(table: Tensor, tops: list[int]) -> list[TokenLogprob]:
    """Reads the table on the host; position i lists the tops[i] most likely tokens."""
    listed = (table.shape[-1] - _TOP) // 2
    return [
        TokenLogprob(
            token_id=int(row[_TOKEN]),
            logprob=row[_LOGPROB],
            rank=int(row[_RANK]),
            top=tuple((int(row[_TOP + i]), row[_TOP + listed + i]) for i in range(min(top, listed))),
        )
        for row, top in zip(table.tolist(), tops, strict=True)
    ]

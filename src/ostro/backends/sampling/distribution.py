"""Arithmetic on rows of scores: ranking, weighting, drawing. Knows no requests and no sequences.

A row is represented by its gaps: how far each score is below the row's best. Gaps are never negative, so nothing here
overflows at any temperature, the best token's weight is exactly 1, and a gap's bits sort like an integer.

Every function is batch-invariant: a row gives the same bits alone or among others. That rules out a plain sum over the
vocabulary, which torch splits across threads when there are few rows: sums go over fixed-length blocks instead.

A draw is a race (the Gumbel-max trick with exponentials): each entry has its own exponential random number and arrives
at number / weight; the first to arrive is drawn. Blocks of tokens race first, each with the sum of its tokens' weights,
then the tokens in the winning block race each other:

    blocks   number[128 + id // 128] / sum of the block's weights      one random number for 128 tokens
    slots    number[id % 128] / the token's weight                     shared by all blocks, as only one wins

This has the same distribution as a race of all tokens, at a fraction of the random numbers. A change in the weights'
last digits, as logits show between different batches, changes the token only if two entries arrive within those digits
of each other. Inverting the cumulative sum of weights would be equally exact, but accumulates the changes of all
preceding tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ostro.backends.sampling.random_stream import exponentials

# Divides nearly every vocabulary size in use, so rows rarely need to be padded and copied. Part of what a seed means:
# another length draws other tokens.
_BLOCK = 128
_LOW_32 = 0xFFFFFFFF


def gaps_below(peaks: Tensor, scores: Tensor) -> Tensor:
    """[rows, vocab]: 0 for the best score, infinity for a banned one. `peaks` holds each row's best score."""
    # Adding 0 turns a best score of -0.0 into 0.0; otherwise its gap to 0.0 would be -0.0, whose bits sort first.
    return (peaks + 0.0).unsqueeze(-1) - scores


def weigh(gaps: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities exp(-gap / temperature), one temperature per row."""
    # A positive temperature that underflows to zero in fp32 would give 0 / 0 for the best token.
    divisor = -temperature.clamp(min=torch.finfo(gaps.dtype).tiny).unsqueeze(-1)
    return gaps.div(divisor).exp_()


def ranked(gaps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest gaps of each row and their token ids, best first; ties go to the lower id.

    The ranking is total: a shorter one is a prefix of a longer one, which `torch.topk` alone does not guarantee for
    ties.
    """
    vocab = gaps.shape[-1]
    if count == 1:
        best, ids = gaps.min(dim=-1, keepdim=True)
        return best, ids
    ids = torch.arange(vocab, device=gaps.device)
    keys = gaps.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)
    order = keys.sort(dim=-1).values if count == vocab else keys.topk(count, dim=-1, largest=False).values
    return (order >> 32).to(torch.int32).view(gaps.dtype), order & _LOW_32


def by_id(weights: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """[rows, vocab]: scatters ranked weights to their token ids; unranked tokens get weight zero."""
    return weights.new_zeros(len(weights), vocab).scatter_(1, ids, weights)


def total(weights: Tensor) -> Tensor:
    """Each row's sum, in float64."""
    # A cumulative sum has a fixed order, unlike a plain sum.
    return _blocks(weights).sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[:, -1]


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """One index per row, with probability proportional to its weight; `keys` are the rows' random streams.

    Never returns an index of weight zero, unless the row has nothing else. All-zero and NaN rows still get a valid
    index.
    """
    blocks = _blocks(weights)
    noise = exponentials(keys, _BLOCK + blocks.shape[1])
    block = _winner(noise[:, _BLOCK:], blocks.sum(dim=-1))
    within = blocks[torch.arange(len(blocks), device=blocks.device), block]
    return block * _BLOCK + _winner(noise[:, :_BLOCK], within)


def _winner(noise: Tensor, weights: Tensor) -> Tensor:
    """The first to arrive if entry i takes noise / weight: i with probability weight / sum of weights."""
    return (noise / weights).argmin(dim=-1)


def _blocks(weights: Tensor) -> Tensor:
    # Weights are already rounded to fp32; summing so short a block in fp32 adds no more error than that.
    short = -weights.shape[-1] % _BLOCK
    padded = functional.pad(weights, (0, short)) if short else weights
    return padded.unflatten(-1, (-1, _BLOCK))

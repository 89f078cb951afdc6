"""Arithmetic on rows of scores: rank them, weigh them, draw from them. Knows no requests and no sequences.

A row is described by its gaps: how far each score lies below the row's best. Gaps are never negative, so nothing here
overflows at any temperature, the best token weighs exactly 1, and the bits of a gap sort as an integer.

Every function gives a row the same bits whether it comes alone or among others. That rules out a plain sum over the
vocabulary, which torch splits between threads when there are few rows: sums go over blocks of fixed length instead.

A draw is a race. Every entry has an exponential random number of its own, arrives after number / weight, and the first
to arrive is drawn. A block of tokens runs as one entry that has the sum of their weights, then the tokens of the block
that won run against each other:

    blocks   number[128 + id // 128] / sum of the block's weights      one random number for 128 tokens
    slots    number[id % 128] / the token's weight                     the same ones serve whichever block won

That has the distribution of a race between all tokens, and its random numbers cost next to nothing. Weights that change
in their last digits, as logits do between one batch and another, change the token only where two entries arrive within
those digits of each other. Looking up one random number in the running sum of the weights would be as exact, but there
the changes of all tokens before it add up.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ostro.runner.random_stream import exponentials

# Divides nearly every vocabulary in use, so that rows are seldom copied to be padded. Part of what a seed means:
# another length draws other tokens.
_BLOCK = 128
_LOW_32 = 0xFFFFFFFF


def gaps_below(peaks: Tensor, scores: Tensor) -> Tensor:
    """[rows, vocab]: 0 at the best score, infinite at a banned one. `peaks` holds each row's best score."""
    # Adding 0 makes a best score of -0.0 into 0.0: else its gap to 0.0 were -0.0, whose bits sort before all others.
    return (peaks + 0.0).unsqueeze(-1) - scores


def weigh(gaps: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities exp(-gap / temperature), one temperature a row."""
    # A positive temperature that is zero in fp32 would make 0 / 0 of the best token.
    divisor = -temperature.clamp(min=torch.finfo(gaps.dtype).tiny).unsqueeze(-1)
    return gaps.div(divisor).exp_()


def ranked(gaps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest gaps of each row and their token ids, best first; equal gaps by lower id.

    The ranking is total: a shorter one is the beginning of a longer one, which `torch.topk` on its own does not
    promise where values are equal.
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
    """[rows, vocab]: ranked weights put back at their token ids; tokens that were not ranked weigh nothing."""
    return weights.new_zeros(len(weights), vocab).scatter_(1, ids, weights)


def total(weights: Tensor) -> Tensor:
    """Each row's sum, in float64."""
    # A running sum is taken in order, which a plain sum is not.
    return _blocks(weights).sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[:, -1]


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """For each row one index, with a probability proportional to its weight; `keys` are the rows' random streams.

    Never an index of weight zero, except in a row that has nothing else; that row, or one of NaN, still gets an index
    within the row.
    """
    blocks = _blocks(weights)
    noise = exponentials(keys, _BLOCK + blocks.shape[1])
    block = _winner(noise[:, _BLOCK:], blocks.sum(dim=-1))
    within = blocks[torch.arange(len(blocks), device=blocks.device), block]
    return block * _BLOCK + _winner(noise[:, :_BLOCK], within)


def _winner(noise: Tensor, weights: Tensor) -> Tensor:
    """Who arrives first when entry i takes noise / weight: i with probability weight / sum of weights."""
    return (noise / weights).argmin(dim=-1)


def _blocks(weights: Tensor) -> Tensor:
    # Weights are rounded to fp32 already; summing a block this short in fp32 adds no more than that.
    short = -weights.shape[-1] % _BLOCK
    padded = functional.pad(weights, (0, short)) if short else weights
    return padded.unflatten(-1, (-1, _BLOCK))

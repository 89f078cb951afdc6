"""Arithmetic on rows of scores: rank them, weigh them, draw from them. Knows no requests and no sequences.

A row is described by its gaps: how far each score lies below the row's best. Gaps are never negative, so nothing here
overflows at any temperature, the best token weighs exactly 1, and the bits of a gap sort as an integer.

Every function gives a row the same bits whether it comes alone or among others. That rules out a plain sum over the
vocabulary, which torch splits between threads when there are few rows: sums go over blocks of fixed length instead.
"""

import torch
from torch import Tensor
from torch.nn import functional

# Divides nearly every vocabulary in use, so that rows are seldom copied to be padded.
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


def total(weights: Tensor) -> Tensor:
    """Each row's sum, in float64."""
    return _block_ends(_blocks(weights))[:, -1]


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """For each row the index at which the running sum of weights first exceeds uniform * total.

    Two levels: sum whole blocks, then look inside the one block that holds the target. Never an index of weight zero,
    except in a row that has nothing else; that row, or one of NaN, still gets an index within the row.
    """
    blocks = _blocks(weights)
    ends = _block_ends(blocks)
    target = uniforms * ends[:, -1]
    block = _first_above(ends, target)
    start = functional.pad(ends, (1, 0)).gather(1, block.unsqueeze(1)).squeeze(1)
    within = blocks[torch.arange(len(blocks), device=blocks.device), block].cumsum(dim=-1, dtype=torch.float64)
    return (block * _BLOCK + _first_above(within, target - start)).clamp(max=weights.shape[-1] - 1)


def _blocks(weights: Tensor) -> Tensor:
    short = -weights.shape[-1] % _BLOCK
    padded = functional.pad(weights, (0, short)) if short else weights
    return padded.unflatten(-1, (-1, _BLOCK))


def _block_ends(blocks: Tensor) -> Tensor:
    # Weights are rounded to fp32 already; a block this short adds no more than that, and the long sum is in float64.
    return blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Index of the first running sum above the target."""
    # A block's own sum is rounded unlike the sums inside it, so the target can lie at or beyond the last of these.
    last = ends[:, -1]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    passed = (ends <= target.unsqueeze(-1)).sum(dim=-1)
    return passed.clamp(max=ends.shape[-1] - 1)

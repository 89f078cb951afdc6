# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 -- what is known at compile time is in capitals
"""Samples tokens from logits on the device, inside a CUDA graph, with the same result as
`ostro.backends.sampling.sampler.sample`.

    block_stats   (row, part of the vocabulary)   for each block of 128: its best score and its weight
    cut           (row)                           where top-k, top-p and min-p cut; weights of the tokens kept per block
    finish        (row)                           blocks race, then the winning block's tokens; greedy: the best

The middle kernel is launched only in steps with truncated rows. A block's weight is relative to its own best score, so
one pass over the logits suffices: the row's best, known only after that pass, is applied when the blocks race. A
block's results do not depend on the other rows, or on how the vocabulary is split into parts.

Tokens match the plain sampler's for the same scores, settings, seed, choice and position, up to the last digits of exp
and log. Logit bias and bans are not handled here: the caller adds them to the logits beforehand, bans as -inf.

A step's log-probabilities need no kernel: `logprob_table`, given fp32 logits and int64 tokens, runs entirely in torch
and does not synchronise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu.sampling_cut import cut_kernel
from ostro.kernels.gpu.sampling_scores import (
    BLOCK,
    arrivals,
    exponentials,
    gap_bits,
    is_kept,
    load_scores,
    penalises,
    position_key,
    sharpness_of,
    truncation_of,
    weights_in_block,
)
from ostro.kernels.gpu.sampling_tables import SamplerTables, SlotSettings

__all__ = ["ALL_BANNED", "INFINITE", "NOT_A_NUMBER", "SamplerTables", "SlotSettings", "sample_tokens"]

ALL_BANNED, INFINITE, NOT_A_NUMBER = 1, 2, 3
"""Why nothing could be drawn for a row: its best score is -inf, +inf or NaN. 0 means that a token was drawn."""

_BLOCK = 128
_CANDIDATES = 4096
# Rounding after each operation, like the plain sampler, keeps equal scores equal.
_LAUNCH = {"enable_fp_fusion": False}


def sample_tokens(
    logits: Tensor,
    slots: Tensor,
    tables: SamplerTables,
    out_tokens: Tensor,
    out_errors: Tensor,
    *,
    truncated: bool,
    penalties: bool,
    candidates: int = _CANDIDATES,
) -> None:
    """Draws the next token of each row's sequence and counts it in the tables.

    logits [batch, vocab] of any float dtype; slots int32 [batch], -1 for padding rows, for which nothing is written;
    out_tokens int32 or int64 [batch]; out_errors int8 [batch]. A row that fails gets an error and token 0, because the
    next step may already be using it. `truncated` and `penalties` must be set if any slot in the batch needs them:
    without them, those settings are ignored.
    """
    batch, vocab = logits.shape
    assert vocab == tables.vocab
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab, _BLOCK)
    # Very small vocabularies share one compiled kernel.
    blocks = max(triton.next_power_of_2(num_blocks), 16)
    settings = tables.settings
    # An unused pointer must still be valid.
    counts = tables.keep_counts() if penalties else settings
    # Each on its own, and so aligned for any batch: one binary serves all.
    maxima, sums = (settings.new_empty(batch, num_blocks, dtype=torch.float32) for _ in range(2))
    cuts = slots.new_empty(batch, 2, dtype=torch.int32)
    # A large batch fills the device with rows; a few rows must each be spread over it.
    tile_blocks = min(64 if batch >= 32 else 16, blocks)
    block_stats_kernel[(triton.cdiv(num_blocks, tile_blocks), batch)](
        logits, logits.stride(0), slots, settings, counts, maxima, sums, vocab, num_blocks,
        TILE_BLOCKS=tile_blocks, PENALTIES=penalties, num_warps=4, **_LAUNCH,
    )  # fmt: skip
    if truncated:
        scratch = slots.new_empty(batch, blocks + 2 * candidates, dtype=torch.int32)
        cut_kernel[(batch,)](
            logits, logits.stride(0), slots, settings, counts, maxima, sums, cuts, scratch, vocab, num_blocks,
            BLOCKS=blocks, TILE_BLOCKS=min(32, blocks), TILE=min(64, blocks) * _BLOCK, CAPACITY=candidates,
            PENALTIES=penalties, num_warps=16, **_LAUNCH,
        )  # fmt: skip
    finish_kernel[(batch,)](
        logits, logits.stride(0), slots, settings, counts, maxima, sums, cuts,
        tables.num_output, tables.last_token, out_tokens, out_errors, vocab, num_blocks,
        BLOCKS=blocks, TRUNCATED=truncated, PENALTIES=penalties, num_warps=8, **_LAUNCH,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks"])
def block_stats_kernel(
    logits,
    logits_stride,
    slots,
    settings,
    counts,
    maxima,
    sums,
    vocab,
    num_blocks,
    TILE_BLOCKS: tl.constexpr,
    PENALTIES: tl.constexpr,
):
    """Each block's best score and its weight relative to that; NaN if the block contains any. Greedy: no weights."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    logits += row * logits_stride
    counts += slot * vocab
    blocks = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scores = load_scores(logits, counts, settings, slot, ids, ids < vocab, PENALTIES)
    is_nan = scores != scores
    best = tl.max(tl.where(is_nan, float("-inf"), scores), axis=1)
    sharpness = sharpness_of(settings, slot)
    if sharpness > 0.0:
        total = tl.sum(weights_in_block(scores, best[:, None], sharpness), axis=1)
    else:
        total = tl.where(tl.max(is_nan.to(tl.int32), axis=1) != 0, float("nan"), 1.0)
    inside = blocks < num_blocks
    tl.store(maxima + row * num_blocks + blocks, best, mask=inside)
    tl.store(sums + row * num_blocks + blocks, total, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def finish_kernel(
    logits,
    logits_stride,
    slots,
    settings,
    counts,
    maxima,
    sums,
    cuts,
    num_output,
    last_token,
    out_tokens,
    out_errors,
    vocab,
    num_blocks,
    BLOCKS: tl.constexpr,
    TRUNCATED: tl.constexpr,
    PENALTIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    logits += row * logits_stride
    counts += slot * vocab
    blocks = tl.arange(0, BLOCKS)
    best = tl.load(maxima + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    total = tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    peak = tl.max(best, axis=0)
    error = tl.where(peak == float("inf"), 2, tl.where(peak == float("-inf"), 1, 0))
    error = tl.where(tl.max((total != total).to(tl.int32), axis=0) != 0, 3, error)

    sharpness = sharpness_of(settings, slot)
    position = tl.load(num_output + slot)
    key = position_key(settings, slot, position)
    if sharpness > 0.0:
        weights = total.to(tl.float64) * weights_in_block(best, peak, sharpness).to(tl.float64)
        times = arrivals(exponentials(key, blocks + BLOCK), weights)
    else:
        times = -best.to(tl.float64)
    block = tl.argmin(times, axis=0)

    places = tl.arange(0, BLOCK)
    ids = block * BLOCK + places
    scores = load_scores(logits, counts, settings, slot, ids, ids < vocab, PENALTIES)
    if sharpness > 0.0:
        shares = weights_in_block(scores, tl.max(scores, axis=0), sharpness)
        if TRUNCATED:
            _, _, min_p = truncation_of(settings, slot)
            gaps = gap_bits(peak, scores)
            kept = is_kept(gaps, ids, sharpness, tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1), min_p)
            shares = tl.where(kept, shares, 0.0)
        order = arrivals(exponentials(key, places), shares.to(tl.float64))
    else:
        order = -scores.to(tl.float64)
    token = tl.where(error == 0, block * BLOCK + tl.argmin(order, axis=0), 0)

    tl.store(out_tokens + row, token)
    tl.store(out_errors + row, error)
    tl.store(last_token + slot, token)
    tl.store(num_output + slot, position + 1)
    if PENALTIES:
        _count(counts + token, penalises(settings, slot) & (error == 0))


@triton.jit
def _count(cell, counted):
    seen = tl.load(cell)
    # Saturates: one more would turn negative.
    tl.store(cell, seen + 2, mask=counted & (seen < 32766))

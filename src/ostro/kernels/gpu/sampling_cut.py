# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 -- what is known at compile time is in capitals
"""Finds where top-k, top-p and min-p cut a row's ranking, without sorting. One program per row; rows without truncation
return at once.

Top-k and top-p each keep a prefix of the ranking by (gap, id), so together they are described by the last token kept:
its gap and its id. Min-p needs no search. The gap is found by a search over gaps as integers (their bits): each pass
with three pivots leaves a quarter of the bracket, and the values seen narrow it further, so a row with few distinct
values takes few passes.

A pass over the whole row is expensive. The blocks' best scores, already known, usually avoid it:

    top-k   if k blocks have their best within a gap, at least k tokens are within it
    top-p   if the blocks' best tokens alone reach the share, the nucleus is within the gap of the last one needed

The tokens within that gap are gathered in id order, and the search runs over them; it runs over the whole row only if
there are more than CAPACITY, or if no such gap is known.
"""

import triton
import triton.language as tl

from ostro.kernels.gpu.sampling_scores import (
    BLOCK,
    INFINITE_GAP,
    NO_GAP,
    gap_bits,
    is_kept,
    load_scores,
    sharpness_of,
    truncation_of,
    weight_of,
    weights_in_block,
)

RUN = tl.constexpr(8)
"""Consecutive elements that one thread loads at once: 16 bytes of logits in bf16."""


@triton.jit(do_not_specialize=["num_blocks"])
def cut_kernel(
    logits,
    logits_stride,
    slots,
    settings,
    counts,
    maxima,
    sums,
    cuts,
    scratch,
    vocab,
    num_blocks,
    BLOCKS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PENALTIES: tl.constexpr,
):
    """Writes each row's last kept (gap, id) to `cuts`, and the weight of each block's kept tokens to `sums`.

    A row of scratch: the blocks being read, then the candidates' gaps, then their ids.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    tl.store(cuts + row * 2, INFINITE_GAP)
    tl.store(cuts + row * 2 + 1, vocab)
    sharpness = sharpness_of(settings, slot)
    top_k, top_p, min_p = truncation_of(settings, slot)
    if (sharpness == 0.0) | ((top_k == 0) & (top_p >= 1.0) & (min_p == 0.0)):
        return
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    best = tl.load(maxima + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    total = tl.load(sums + row * num_blocks + blocks, mask=inside, other=0.0)
    peak = tl.max(best, axis=0)
    if (tl.max((total != total).to(tl.int32), axis=0) != 0) | (tl.abs(peak) == float("inf")):
        return
    logits += row * logits_stride
    counts += slot * vocab
    sums += row * num_blocks
    scratch += row * (BLOCKS + 2 * CAPACITY)
    candidates = scratch + BLOCKS
    gaps = gap_bits(peak, best)

    cut_gap = tl.full((), INFINITE_GAP, tl.int32)
    cut_id = tl.full((), NO_GAP, tl.int32)
    if (top_k > 0) | (top_p < 1.0):
        heads = tl.where(inside, weight_of(gaps, sharpness), 0.0)
        share = top_p * tl.sum((total * heads).to(tl.float64), axis=0)
        units = tl.where(top_k > 0, tl.where(inside, 1.0, 0.0), heads).to(tl.float64)
        limit = _gap_that_reaches(gaps, units, tl.where(top_k > 0, top_k.to(tl.float64), share))
        held = tl.full((), CAPACITY + 1, tl.int32)
        if limit < INFINITE_GAP:
            num_near = _list_blocks(scratch, blocks, gaps <= limit)
            held = _gather(
                logits, counts, settings, slot, scratch, num_near, candidates, peak, limit, vocab,
                TILE_BLOCKS, CAPACITY, PENALTIES,
            )  # fmt: skip
        if held <= CAPACITY:
            cut_gap, cut_id = _find_cut(
                logits, counts, settings, slot, candidates, held, peak, sharpness, top_k, top_p, share,
                CAPACITY, CAPACITY, True, PENALTIES,
            )  # fmt: skip
        else:
            cut_gap, cut_id = _find_cut(
                logits, counts, settings, slot, candidates, vocab, peak, sharpness, top_k, top_p, share,
                TILE, CAPACITY, False, PENALTIES,
            )  # fmt: skip
        tl.store(cuts + row * 2, cut_gap)
        tl.store(cuts + row * 2 + 1, cut_id)

    near = is_kept(gaps, blocks * BLOCK, sharpness, cut_gap, cut_id, min_p) & inside
    tl.store(sums + blocks, tl.zeros([BLOCKS], tl.float32), mask=inside & (near == 0))
    num_near = _list_blocks(scratch, blocks, near)
    _weigh_kept(
        logits, counts, settings, slot, scratch, num_near, sums, peak, sharpness, cut_gap, cut_id, min_p, vocab,
        TILE_BLOCKS, PENALTIES,
    )  # fmt: skip


@triton.jit
def _gap_that_reaches(gaps, units, target):
    """The smallest gap up to which the units add up to the target; infinite if all together do not."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), INFINITE_GAP, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(gaps <= middle, units, 0.0), axis=0) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def _list_blocks(listed, blocks, chosen):
    """Writes the chosen blocks to `listed` in order and returns their number."""
    ones = chosen.to(tl.int32)
    # Threads read what others wrote: neither before it is written nor after it is overwritten.
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(ones, axis=0) - 1, blocks, mask=chosen)
    tl.debug_barrier()
    return tl.sum(ones, axis=0)


@triton.jit
def _gather(
    logits, counts, settings, slot, listed, num_listed, candidates, peak, limit, vocab,
    TILE_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Collects the listed blocks' tokens within `limit` into `candidates` in id order. Returns their number.

    Stops early once there are more than CAPACITY.
    """
    held = tl.full((), 0, tl.int32)
    tile = tl.full((), 0, tl.int32)
    while (tile * TILE_BLOCKS < num_listed) & (held <= CAPACITY):
        at_list = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        blocks = tl.load(listed + at_list, mask=at_list < num_listed, other=0)
        ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (at_list < num_listed)[:, None] & (ids < vocab)
        gaps = gap_bits(peak, load_scores(logits, counts, settings, slot, ids, mask, PENALTIES))
        # The limit is finite, so masked elements are beyond it.
        within = (gaps <= limit).to(tl.int32)
        in_block = tl.sum(within, axis=1)
        at = (held + tl.cumsum(in_block, axis=0) - in_block)[:, None] + tl.cumsum(within, axis=1) - within
        fits = (within != 0) & (at < CAPACITY)
        tl.store(candidates + at, gaps, mask=fits)
        tl.store(candidates + CAPACITY + at, ids, mask=fits)
        held += tl.sum(in_block, axis=0)
        tile += 1
    # Threads read what others wrote.
    tl.debug_barrier()
    return held


@triton.jit
def _find_cut(
    logits, counts, settings, slot, candidates, length, peak, sharpness, top_k, top_p, share,
    TILE: tl.constexpr, CAPACITY: tl.constexpr, GATHERED: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The last token that top-k and top-p keep: its gap and id."""
    cut_gap = tl.full((), INFINITE_GAP, tl.int32)
    equals = tl.full((), 2147483647.0, tl.float64)
    if top_k > 0:
        cut_gap, before = _search(
            logits, counts, settings, slot, candidates, length, peak, sharpness, cut_gap, top_k.to(tl.float64),
            TILE, False, GATHERED, PENALTIES,
        )  # fmt: skip
        equals = top_k - before
    if top_p < 1.0:
        if top_k > 0:
            better = _mass_before(
                logits, counts, settings, slot, candidates, length, peak, sharpness, cut_gap, TILE, GATHERED, PENALTIES
            )
            share = top_p * (better + equals * weight_of(cut_gap, sharpness).to(tl.float64))
        gap, before_gap = _search(
            logits, counts, settings, slot, candidates, length, peak, sharpness, cut_gap, share,
            TILE, True, GATHERED, PENALTIES,
        )  # fmt: skip
        weight = weight_of(gap, sharpness).to(tl.float64)
        # Weights of zero never add up to the share: all of them are kept.
        needed = tl.where(weight > 0, tl.ceil((share - before_gap) / tl.where(weight > 0, weight, 1.0)), 2147483647.0)
        equals = tl.where(gap == cut_gap, tl.minimum(equals, needed), needed)
        cut_gap = gap
    wanted = tl.maximum(tl.minimum(equals, 2147483647.0), 1.0).to(tl.int32)

    cut_id = tl.full((), -1, tl.int32)
    found = tl.full((), 0, tl.int32)
    tile = tl.full((), 0, tl.int32)
    while (tile * TILE < length) & (found < wanted):
        at = _places(tile, TILE)
        gaps = _load_gaps(logits, counts, settings, slot, candidates, at, length, peak, GATHERED, PENALTIES)
        ids = at
        if GATHERED:
            ids = tl.load(candidates + CAPACITY + at, mask=at < length, other=0)
        equal = (gaps == cut_gap).to(tl.int32)
        in_run = tl.sum(equal, axis=1)
        rank = (found + tl.cumsum(in_run, axis=0) - in_run)[:, None] + tl.cumsum(equal, axis=1)
        last = tl.max(tl.where((equal != 0) & (rank <= wanted), ids, -1), axis=1)
        cut_id = tl.maximum(cut_id, tl.max(last, axis=0))
        found += tl.sum(in_run, axis=0)
        tile += 1
    return cut_gap, cut_id


@triton.jit
def _search(
    logits, counts, settings, slot, candidates, length, peak, sharpness, high, target,
    TILE: tl.constexpr, MASS: tl.constexpr, GATHERED: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """The smallest gap up to which there are `target` tokens, or that much weight (MASS), and the amount before it.

    Returns `high` if nothing below it suffices.
    """
    low = tl.full((), -1, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        pivot_1 = low + step
        pivot_2 = tl.minimum(pivot_1 + step, high - 1)
        pivot_3 = tl.minimum(pivot_2 + step, high - 1)
        upto_1 = tl.zeros([TILE // RUN], tl.float32)
        upto_2 = tl.zeros([TILE // RUN], tl.float32)
        upto_3 = tl.zeros([TILE // RUN], tl.float32)
        least = tl.full([TILE // RUN], NO_GAP, tl.int32)
        most = tl.full([TILE // RUN], -1, tl.int32)
        tile = tl.full((), 0, tl.int32)
        while tile * TILE < length:
            at = _places(tile, TILE)
            gaps = _load_gaps(logits, counts, settings, slot, candidates, at, length, peak, GATHERED, PENALTIES)
            units = weight_of(gaps, sharpness) if MASS else tl.full([TILE // RUN, RUN], 1.0, tl.float32)
            upto_1 += tl.sum(tl.where(gaps <= pivot_1, units, 0.0), axis=1)
            upto_2 += tl.sum(tl.where(gaps <= pivot_2, units, 0.0), axis=1)
            upto_3 += tl.sum(tl.where(gaps <= pivot_3, units, 0.0), axis=1)
            least = tl.minimum(least, tl.min(tl.where(gaps > low, gaps, NO_GAP), axis=1))
            most = tl.maximum(most, tl.max(tl.where(gaps <= high, gaps, -1), axis=1))
            tile += 1
        sum_1 = tl.sum(upto_1.to(tl.float64), axis=0)
        sum_2 = tl.sum(upto_2.to(tl.float64), axis=0)
        sum_3 = tl.sum(upto_3.to(tl.float64), axis=0)
        reached_1 = sum_1 >= target
        reached_2 = sum_2 >= target
        reached_3 = sum_3 >= target
        before = tl.where(reached_1, before, tl.where(reached_2, sum_1, tl.where(reached_3, sum_2, sum_3)))
        above = tl.where(reached_1, low, tl.where(reached_2, pivot_1, tl.where(reached_3, pivot_2, pivot_3)))
        high = tl.where(reached_1, pivot_1, tl.where(reached_2, pivot_2, tl.where(reached_3, pivot_3, high)))
        # There are no values between the bracket's ends and the outermost values seen in it.
        high = tl.maximum(tl.minimum(high, tl.max(most, axis=0)), above + 1)
        low = tl.maximum(above, tl.minimum(tl.min(least, axis=0), high) - 1)
    return high, before


@triton.jit
def _mass_before(
    logits, counts, settings, slot, candidates, length, peak, sharpness, limit,
    TILE: tl.constexpr, GATHERED: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros([TILE // RUN], tl.float32)
    tile = tl.full((), 0, tl.int32)
    while tile * TILE < length:
        at = _places(tile, TILE)
        gaps = _load_gaps(logits, counts, settings, slot, candidates, at, length, peak, GATHERED, PENALTIES)
        sums += tl.sum(tl.where(gaps < limit, weight_of(gaps, sharpness), 0.0), axis=1)
        tile += 1
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def _places(tile, TILE: tl.constexpr):
    """The indexes of one tile, in runs that one thread loads at once and sums on its own."""
    return tile * TILE + tl.arange(0, TILE // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def _load_gaps(
    logits, counts, settings, slot, candidates, at, length, peak, GATHERED: tl.constexpr, PENALTIES: tl.constexpr
):
    """Gaps as bits, of the candidates or of the whole row; NO_GAP beyond `length`."""
    if GATHERED:
        gaps = tl.load(candidates + at, mask=at < length, other=NO_GAP)
    else:
        scores = load_scores(logits, counts, settings, slot, at, at < length, PENALTIES)
        gaps = tl.where(at < length, gap_bits(peak, scores), NO_GAP)
    return gaps


@triton.jit
def _weigh_kept(
    logits, counts, settings, slot, listed, num_listed, sums, peak, sharpness, cut_gap, cut_id, min_p, vocab,
    TILE_BLOCKS: tl.constexpr, PENALTIES: tl.constexpr,
):  # fmt: skip
    """Writes the weight of the listed blocks' kept tokens."""
    tile = tl.full((), 0, tl.int32)
    while tile * TILE_BLOCKS < num_listed:
        at_list = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        blocks = tl.load(listed + at_list, mask=at_list < num_listed, other=0)
        ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (at_list < num_listed)[:, None] & (ids < vocab)
        scores = load_scores(logits, counts, settings, slot, ids, mask, PENALTIES)
        kept = is_kept(gap_bits(peak, scores), ids, sharpness, cut_gap, cut_id, min_p)
        weights = weights_in_block(scores, tl.max(scores, axis=1)[:, None], sharpness)
        tl.store(sums + blocks, tl.sum(tl.where(kept, weights, 0.0), axis=1), mask=at_list < num_listed)
        tile += 1

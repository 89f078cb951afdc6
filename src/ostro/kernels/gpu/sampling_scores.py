# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 -- what is known at compile time is in capitals
"""Shared by all sampling kernels: a slot's settings, scores with penalties applied as they are loaded, weights, noise.

Scores are described as the plain sampler describes them: by gaps below the row's best. A gap is never negative, so its
bits, read as an integer, rank as it does.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
"""Tokens that race as one block; part of what a seed means."""
INFINITE_GAP = tl.constexpr(0x7F800000)
"""The bits of an infinite gap: that of a banned token, and the largest possible."""
NO_GAP = tl.constexpr(0x7FFFFFFF)
"""Larger than the bits of any gap."""

_COLUMNS = tl.constexpr(8)
_SHARPNESS = tl.constexpr(0)
_TOP_K = tl.constexpr(1)
_TOP_P = tl.constexpr(2)
_MIN_P = tl.constexpr(3)
_REPETITION = tl.constexpr(4)
_PRESENCE = tl.constexpr(5)
_FREQUENCY = tl.constexpr(6)
_KEY = tl.constexpr(7)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def sharpness_of(settings, slot):
    """log2(e) / temperature; 0 is greedy."""
    return tl.load(settings + slot * _COLUMNS + _SHARPNESS).to(tl.float32)


@triton.jit
def truncation_of(settings, slot):
    """top_k (0 is off), top_p and min_p."""
    top_k = tl.load(settings + slot * _COLUMNS + _TOP_K).to(tl.int32)
    top_p = tl.load(settings + slot * _COLUMNS + _TOP_P)
    return top_k, top_p, tl.load(settings + slot * _COLUMNS + _MIN_P).to(tl.float32)


@triton.jit
def penalises(settings, slot):
    repetition = tl.load(settings + slot * _COLUMNS + _REPETITION)
    presence = tl.load(settings + slot * _COLUMNS + _PRESENCE)
    return (repetition != 1.0) | (presence != 0.0) | (tl.load(settings + slot * _COLUMNS + _FREQUENCY) != 0.0)


@triton.jit
def load_scores(logits, counts, settings, slot, ids, mask, PENALTIES: tl.constexpr):
    """fp32 scores, -inf where masked. `logits` and `counts` point at the row's first token."""
    scores = tl.load(logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if PENALTIES:
        repetition = tl.load(settings + slot * _COLUMNS + _REPETITION).to(tl.float32)
        presence = tl.load(settings + slot * _COLUMNS + _PRESENCE)
        frequency = tl.load(settings + slot * _COLUMNS + _FREQUENCY)
        # Rows without penalties read no counts: none are kept for them.
        seen = tl.load(counts + ids, mask=tl.where(penalises(settings, slot), mask, False), other=0).to(tl.int32)
        discouraged = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
        scores = tl.where(seen != 0, discouraged, scores)
        times = seen >> 1
        # In float64, like the plain sampler: a difference in the last digit would break ties between scores.
        amount = (presence + frequency * times.to(tl.float64)).to(tl.float32)
        scores = tl.where(times != 0, scores - amount, scores)
    return scores


@triton.jit
def gap_bits(peak, scores):
    # Adding 0 turns a best score of -0.0 into 0.0; otherwise its gap to 0.0 would be -0.0, whose bits are negative.
    return ((peak + 0.0) - scores).to(tl.int32, bitcast=True)


@triton.jit
def weight_of(gaps, sharpness):
    """exp(-gap / temperature), for gaps given as bits."""
    return tl.exp2(-(gaps.to(tl.float32, bitcast=True) * sharpness))


@triton.jit
def is_kept(gaps, ids, sharpness, cut_gap, cut_id, min_p):
    """Whether tokens rank no lower than (cut_gap, cut_id) and are likely enough for min_p."""
    ranked = (gaps < cut_gap) | ((gaps == cut_gap) & (ids <= cut_id))
    return ranked & (weight_of(gaps, sharpness) >= min_p)


@triton.jit
def weights_in_block(scores, best, sharpness):
    """Weights relative to the block's own best score, which thus weighs 1 however far below the row's best it is."""
    # If the best is infinite, either all tokens are banned and weigh 0, or the row fails.
    reference = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    return tl.exp2((scores - reference) * sharpness)


@triton.jit
def position_key(settings, slot, position):
    """The start of the random stream for one position of the slot's sequence."""
    base = tl.load(settings + slot * _COLUMNS + _KEY).to(tl.int64, bitcast=True)
    return _mix((base ^ position.to(tl.int64)).to(tl.uint64, bitcast=True) + _GOLDEN)


@triton.jit
def exponentials(key, index):
    """Elements `index` of a stream, exponentially distributed, in float64."""
    words = _mix(key + (index + 1).to(tl.uint64) * _GOLDEN)
    # One minus the uniform number is exact, so its logarithm is as precise as log1p.
    rest = 1.0 - ((words >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(rest)


@triton.jit
def arrivals(noise, weights):
    """When each entry of a race arrives; entries of weight zero never do."""
    runs = weights > 0
    return tl.where(runs, noise / tl.where(runs, weights, 1.0), float("inf"))


@triton.jit
def _mix(words):
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)

"""What attention kernels share: where keys lie in pages, in what format they are multiplied, how scores become
exponents, and what sinks add to them. Imports no torch.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def page_of(table, base, end, page_size: tl.constexpr, block: tl.constexpr):
    """The page of each position from `base` to `base + block`, a scalar if they share one; 0 past the end."""
    if page_size % block == 0:
        page = tl.load(table + base // page_size, mask=base < end, other=0)
    else:
        position = base + tl.arange(0, block)
        page = tl.load(table + position // page_size, mask=position < end, other=0)
    return page.to(tl.int64)


@triton.jit
def within_page(base, kv_head, head_dim: tl.constexpr, page_size: tl.constexpr, block: tl.constexpr):
    """Offsets within their pages of the vectors at `base` to `base + block`; `base` is a multiple of block."""
    inner = tl.arange(0, block)
    slot = base % page_size + inner if page_size % block == 0 else (base + inner) % page_size
    return (kv_head * page_size + slot) * head_dim


@triton.jit
def operand(query, keys):
    """The query in the format in which it is multiplied with keys from the cache, and weights with values.

    8-bit floats widen to float16 in one instruction for two of them, and to bfloat16 in three.
    """
    if keys.dtype.element_ty.is_fp8() and query.dtype == tl.bfloat16:
        # Beyond this, float16 is infinite. No model comes near it.
        wide = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        query = wide.to(tl.float16)
    return query


@triton.jit
def scaled(score, scale, softcap, capped: tl.constexpr):
    """Turns query-key dot products into exponents of two."""
    exponent = score * (scale * _LOG2_E)
    if capped:
        # tanh, using exp2, which the device has in hardware.
        exponent = (1.0 - 2.0 / (tl.exp2(exponent * (2.0 / softcap)) + 1.0)) * (softcap * _LOG2_E)
    return exponent


@triton.jit
def with_sinks(weight, peak, sinks, head, held):
    """A softmax's sum of exp2(exponent - peak) with each head's sink, whose score is not an exponent yet."""
    if sinks is not None:
        score = tl.load(sinks + head, mask=held, other=float("-inf")).to(tl.float32)
        weight += tl.exp2(score * _LOG2_E - peak)
    return weight

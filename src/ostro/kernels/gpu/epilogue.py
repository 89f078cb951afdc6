"""Matmul epilogues: output scales, bias, activation, and adding to the residual, before the result is stored.

Works on finished accumulators; knows nothing of how they were computed.
"""

import triton
import triton.language as tl

from ostro.kernels.gpu.mlp import activate


@triton.jit
def previous(at: tl.tensor, mask: tl.tensor, adds: tl.constexpr) -> tl.tensor:
    """The values that the result is added to. Loaded early so as not to delay the store."""
    if adds:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.zeros(at.shape, tl.float32)


@triton.jit
def finish(
    y: tl.tensor,
    y_up: tl.tensor,
    before: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    mask: tl.tensor,
    outs: tl.tensor,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    multiplier: tl.constexpr,
) -> None:
    """Stores outputs n of one or more rows, where the mask is true. If gated, `y_up` is what the gate y gates."""
    inside = n < outs
    if has_scale:
        y *= tl.load(scale + n, mask=inside, other=0.0)
    if has_bias:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if activation != "":
        y = activate(y, activation)
    if gated:
        if has_scale:
            y_up *= tl.load(scale + outs + n, mask=inside, other=0.0)
        if has_bias:
            y_up += tl.load(bias + outs + n, mask=inside, other=0.0).to(tl.float32)
        y *= y_up
    if multiplier != 1.0:
        y *= multiplier
    if adds:
        y += before
    tl.store(out + n, y.to(out.dtype.element_ty), mask=mask)

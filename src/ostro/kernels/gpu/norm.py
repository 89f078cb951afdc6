"""Fused residual add and RMSNorm, between two projections.

One pass over the row instead of an add, a read and a norm. Knows no layer; the plain twin is `add_rms_norm_plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WIDEST_BLOCK = 16384
"""Wider rows are read twice instead of being held in registers."""


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, invariant: bool = False, pdl: bool = False
) -> Tensor:
    """Adds `delta` to the residual stream `x` [rows, width] in place and returns the norm of the sum. None adds zero.

    Unless `invariant`, the order of a row's sum, and so its last bits, may depend on the number of rows.
    """
    num_rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(triton.next_power_of_2(width), WIDEST_BLOCK)
    # Several narrow rows per program pay off only if there are enough rows to fill the device.
    rows = 1 if invariant else max(1, min(4096 // block, triton.next_power_of_2(num_rows) // 1024))
    _add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if delta is None else delta,
        weight,
        out,
        num_rows,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        eps,
        width=width,
        block=block,
        rows=rows,
        has_delta=delta is not None,
        pdl=pdl,
        num_warps=max(1, min(16, rows * block // 512)),
        launch_pdl=pdl,
    )
    return out


def add_rms_norm_plain(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        x += delta
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    has_delta: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows).to(tl.int64)[:, None]
    column = tl.arange(0, block)[None, :]
    x += row * x_stride
    delta += row * delta_stride
    out += row * width
    inside = row < num_rows
    if block >= width:
        mask = inside & (column < width)
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        value = _add(x + column, delta + column, mask, has_delta)
        factor = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        tl.store(out + column, (value * factor * scale).to(out.dtype.element_ty), mask=mask)
    else:
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        squares = tl.zeros([rows, block], tl.float32)
        for start in range(0, width, block):
            mask = inside & (start + column < width)
            value = _add(x + start + column, delta + start + column, mask, has_delta)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, 1) / width + eps)[:, None]
        tl.debug_barrier()
        for start in range(0, width, block):
            mask = inside & (start + column < width)
            value = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
            scale = tl.load(weight + start + column, mask=start + column < width, other=0.0).to(tl.float32)
            tl.store(out + start + column, (value * factor * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add(x: tl.tensor, delta: tl.tensor, mask: tl.tensor, has_delta: tl.constexpr) -> tl.tensor:
    value = tl.load(x, mask=mask, other=0.0)
    if has_delta:
        # The norm must read the stream as stored, rounded to its dtype.
        value = (value.to(tl.float32) + tl.load(delta, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(x, value, mask=mask)
    return value.to(tl.float32)

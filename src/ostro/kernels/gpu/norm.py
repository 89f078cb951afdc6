"""What happens to the residual stream between two projections, in one pass over each row:

    delta ──(norm)──(· multiplier)──> + x ──┬──> x, in place
                                            └──(norm)──> out

Each norm is an RMS norm or a layer norm. Knows no layer; the plain twin is `add_norm_plain`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WIDEST_BLOCK = 16384
"""Wider rows are read several times instead of being held in registers."""

_FEW_ROWS = 1024


class NormWeights(NamedTuple):
    """An RMS norm, or with a bias a layer norm."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None

    @property
    def kind(self) -> str:
        return "rms" if self.bias is None else "layer"


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    norm: NormWeights | None,
    *,
    delta_norm: NormWeights | None = None,
    multiplier: float = 1.0,
    invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Adds `delta`, normed and multiplied first, to the residual stream `x` [rows, width] in place and returns the norm
    of the sum: x itself if there is no norm. A delta of None adds zero.

    Unless `invariant`, the order of a row's sum, and so its last bits, may depend on the number of rows.
    """
    if delta is None and norm is None:
        return x
    num_rows, width = x.shape
    out = x if norm is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(triton.next_power_of_2(width), WIDEST_BLOCK)
    # Several narrow rows per program pay off only if there are enough rows to fill the device.
    rows = 1 if invariant or num_rows <= _FEW_ROWS else max(1, 4096 // block)
    weight, eps, bias = norm or (x, 0.0, None)
    delta_weight, delta_eps, delta_bias = delta_norm or (x, 0.0, None)
    _add_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if delta is None else delta,
        weight,
        weight if bias is None else bias,
        delta_weight,
        delta_weight if delta_bias is None else delta_bias,
        out,
        num_rows,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        eps,
        delta_eps,
        width=width,
        block=block,
        rows=rows,
        has_delta=delta is not None,
        norm="" if norm is None else norm.kind,
        delta_norm="" if delta_norm is None else delta_norm.kind,
        multiplier=multiplier,
        pdl=pdl,
        num_warps=max(1, min(16, rows * block // 512)),
        launch_pdl=pdl,
    )
    return out


def add_norm_plain(
    x: Tensor,
    delta: Tensor | None,
    norm: NormWeights | None,
    *,
    delta_norm: NormWeights | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    if delta is not None:
        added = delta.float() if delta_norm is None else _normed_plain(delta, delta_norm)
        x.copy_(x.float() + added * multiplier)
    return x if norm is None else _normed_plain(x, norm).to(x.dtype)


def _normed_plain(x: Tensor, norm: NormWeights) -> Tensor:
    """The normed rows in float32."""
    wide = x.float()
    if norm.bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    return scaled if norm.bias is None else scaled + norm.bias.float()


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    delta_weight: tl.tensor,
    delta_bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    delta_eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    has_delta: tl.constexpr,
    norm: tl.constexpr,
    delta_norm: tl.constexpr,
    multiplier: tl.constexpr,
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
        scale, shift = _parameters(weight, bias, column, column < width, norm)
        delta_scale, delta_shift = _parameters(delta_weight, delta_bias, column, column < width, delta_norm)
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        value = tl.load(x + column, mask=mask, other=0.0)
        if has_delta:
            added = tl.load(delta + column, mask=mask, other=0.0).to(tl.float32)
            if delta_norm != "":
                centre, factor = _moments(added, mask, delta_eps, width, delta_norm)
                added = _normed(added, centre, factor, delta_scale, delta_shift, delta_norm)
            value = _sum(value, added, multiplier)
            tl.store(x + column, value, mask=mask)
        if norm != "":
            wide = value.to(tl.float32)
            centre, factor = _moments(wide, mask, eps, width, norm)
            normed = _normed(wide, centre, factor, scale, shift, norm)
            tl.store(out + column, normed.to(out.dtype.element_ty), mask=mask)
    else:
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        if has_delta:
            if delta_norm != "":
                centre, factor = _moments_of_wide(delta, inside, delta_eps, width, block, rows, delta_norm)
            for start in range(0, width, block):
                at = start + column
                mask = inside & (at < width)
                added = tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
                if delta_norm != "":
                    scale, shift = _parameters(delta_weight, delta_bias, at, at < width, delta_norm)
                    added = _normed(added, centre, factor, scale, shift, delta_norm)
                value = _sum(tl.load(x + at, mask=mask, other=0.0), added, multiplier)
                tl.store(x + at, value, mask=mask)
            tl.debug_barrier()
        if norm != "":
            centre, factor = _moments_of_wide(x, inside, eps, width, block, rows, norm)
            for start in range(0, width, block):
                at = start + column
                mask = inside & (at < width)
                wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
                scale, shift = _parameters(weight, bias, at, at < width, norm)
                normed = _normed(wide, centre, factor, scale, shift, norm)
                tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _parameters(
    weight: tl.tensor, bias: tl.tensor, at: tl.tensor, inside: tl.tensor, kind: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A norm's weight and bias; anything where it has none."""
    scale, shift = at, at
    if kind != "":
        scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if kind == "layer":
        shift = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit
def _moments(
    value: tl.tensor, mask: tl.tensor, eps: tl.tensor, width: tl.constexpr, kind: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The centre to subtract from rows, and the factor to multiply them by. Values outside the mask are zero."""
    centre = tl.zeros([value.shape[0], 1], tl.float32)
    if kind == "layer":
        centre = (tl.sum(value, 1) / width)[:, None]
        value = tl.where(mask, value - centre, 0.0)
    return centre, tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]


@triton.jit
def _moments_of_wide(
    source: tl.tensor,
    inside: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    kind: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The same for rows that are read block by block."""
    column = tl.arange(0, block)[None, :]
    centre = tl.zeros([rows, 1], tl.float32)
    if kind == "layer":
        total = tl.zeros([rows, block], tl.float32)
        for start in range(0, width, block):
            total += tl.load(source + start + column, mask=inside & (start + column < width), other=0.0).to(tl.float32)
        centre = (tl.sum(total, 1) / width)[:, None]
    squares = tl.zeros([rows, block], tl.float32)
    for start in range(0, width, block):
        mask = inside & (start + column < width)
        value = tl.load(source + start + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - centre, 0.0)
        squares += value * value
    return centre, tl.rsqrt(tl.sum(squares, 1) / width + eps)[:, None]


@triton.jit
def _normed(
    value: tl.tensor, centre: tl.tensor, factor: tl.tensor, scale: tl.tensor, shift: tl.tensor, kind: tl.constexpr
) -> tl.tensor:
    if kind == "layer":
        return (value - centre) * factor * scale + shift
    return value * factor * scale


@triton.jit
def _sum(value: tl.tensor, added: tl.tensor, multiplier: tl.constexpr) -> tl.tensor:
    """The sum in the stream's dtype: the norm must read the stream as it is stored."""
    if multiplier != 1.0:
        added *= multiplier
    return (value.to(tl.float32) + added).to(value.dtype)

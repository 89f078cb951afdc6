"""GEMV at memory speed, for one row or very few, with fused prologue and epilogue.

    x ──(norm)──> · weightᵀ ──(+ bias)──┬──────────────────> out
                                        ├─(+ residual)─────> residual, in place
                                        └─ act(gate) * up ─> out, where the weight holds gate above up

Multiplies and adds in float32, and keeps a program's weights in registers. The norm's factor is the same for the whole
row, so the result is scaled by it at the end instead of waiting for it at the start.

For programmatic dependent launch (`pdl`) see `small_batch`. Knows shapes; knows no layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.epilogue import finish, previous


@dataclass(frozen=True, slots=True)
class VectorTiling:
    """How a matmul is split into programs. Powers of two."""

    outs: int
    """Outputs per program; with gate and up, of each."""
    ins: int
    """Inputs read at a time."""
    warps: int


def default_tiling(out_features: int, in_features: int, *, gated: bool) -> VectorTiling:
    """For one row, for shapes without a measured tiling. `out_features` counts the weight's rows, both gate and up."""
    width = triton.next_power_of_2(in_features)
    if in_features <= 3072:  # A row of weights fits into a warp's registers.
        warps = 4 if out_features >= 4096 else 2
        return VectorTiling(outs=warps, ins=min(width, 256), warps=warps)
    # About 16 KB of weights per program: a few programs per multiprocessor keep enough loads in flight.
    outs = max(1, 8192 // width) // (2 if gated and width < 8192 else 1)
    warps = 8 if in_features > 8192 else 4
    return VectorTiling(outs=outs, ins=min(width, 256 * warps), warps=warps)


def vector_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiling: VectorTiling,
    *,
    norm: tuple[Tensor, float] | None = None,
    adds: bool = False,
    activation: str | None = None,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it."""
    rows, in_features = x.shape
    outs = weight.shape[0] // (2 if activation else 1)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    if x.dtype == weight.dtype == norm_weight.dtype == torch.bfloat16 and in_features % 2 == x.stride(0) % 2 == 0:
        # Pairs stay packed in registers until they are multiplied: unpacking would have to wait for the loads, and
        # would come before the wait for the previous kernel.
        x, weight, norm_weight = x.view(torch.int32), weight.view(torch.int32), norm_weight.view(torch.int32)
    in_words = x.shape[1]
    block_words = max(1, tiling.ins * in_words // in_features)
    chunks = triton.cdiv(in_words, block_words)
    # At most 64 registers of weights per thread are loaded before the wait; the rest is loaded in a loop after it.
    bytes_a_chunk = tiling.outs * block_words * weight.element_size() * (2 if activation else 1)
    held = min(chunks, max(1, 64 * 4 * 32 * tiling.warps // bytes_a_chunk))
    _vector_kernel[(triton.cdiv(outs, tiling.outs),)](
        x,
        weight,
        weight if bias is None else bias,
        norm_weight,
        out,
        eps,
        outs,
        x.stride(0),
        out.stride(0),
        in_words=in_words,
        in_features=in_features,
        rows=rows,
        block_out=tiling.outs,
        block_words=block_words,
        held=held,
        warp_a_row=tiling.outs >= tiling.warps and block_words * weight.element_size() <= 512,
        even_out=outs % tiling.outs == 0,
        has_norm=norm is not None,
        has_bias=bias is not None,
        adds=adds,
        activation=activation or "",
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        launch_pdl=pdl,
    )


@triton.jit
def _vector_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    outs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    in_words: tl.constexpr,
    in_features: tl.constexpr,
    rows: tl.constexpr,
    block_out: tl.constexpr,
    block_words: tl.constexpr,
    held: tl.constexpr,
    warp_a_row: tl.constexpr,
    even_out: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
    paired: tl.constexpr = in_words != in_features
    even_in: tl.constexpr = in_words % block_words == 0
    n = tl.program_id(0) * block_out + tl.arange(0, block_out)
    k = tl.arange(0, block_words)
    inside = n < outs
    main_at = weight + n.to(tl.int64)[:, None] * in_words + k[None, :]
    up_at = main_at + outs.to(tl.int64) * in_words
    # A warp with its own row of weights also loads the inputs itself: no exchange between warps.
    copies: tl.constexpr = block_out if warp_a_row else 1

    main_held = ()  # type: tuple[tl.tensor, ...]
    up_held = ()  # type: tuple[tl.tensor, ...]
    scale_held = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(held):
        main_held += (_weights(main_at, inside, k, chunk * block_words, in_words, even_out, even_in),)
        if activation != "":
            up_held += (_weights(up_at, inside, k, chunk * block_words, in_words, even_out, even_in),)
        if has_norm:
            scale_held += (_inputs(norm_weight, k, chunk * block_words, in_words, copies, even_in),)
    if pdl:
        gdc_wait()

    # Nothing is stored before the last load, so that no row's loads wait for the previous row's store.
    befores = ()  # type: tuple[tl.tensor, ...]
    sums = ()  # type: tuple[tl.tensor, ...]
    up_sums = ()  # type: tuple[tl.tensor, ...]
    for row in tl.static_range(rows):
        befores += (previous(out + row * out_stride + n, inside, adds),)
    for row in tl.static_range(rows):
        source = x + row * x_stride
        main = tl.zeros([block_out, block_words], tl.float32)
        up = tl.zeros([block_out, block_words], tl.float32)
        squares = tl.zeros([copies, block_words], tl.float32)
        for chunk in tl.static_range(held):
            even, odd = _numbers(_inputs(source, k, chunk * block_words, in_words, copies, even_in), paired)
            if has_norm:
                squares = _add_products(squares, even, odd, even, odd, paired)
                even_scale, odd_scale = _numbers(scale_held[chunk], paired)
                even *= even_scale
                odd *= odd_scale
            even_weight, odd_weight = _numbers(main_held[chunk], paired)
            main = _add_products(main, even_weight, odd_weight, even, odd, paired)
            if activation != "":
                even_weight, odd_weight = _numbers(up_held[chunk], paired)
                up = _add_products(up, even_weight, odd_weight, even, odd, paired)
        for start in range(held * block_words, in_words, block_words):
            even, odd = _numbers(_inputs(source, k, start, in_words, copies, even_in), paired)
            if has_norm:
                squares = _add_products(squares, even, odd, even, odd, paired)
                scales = _inputs(norm_weight, k, start, in_words, copies, even_in)
                even_scale, odd_scale = _numbers(scales, paired)
                even *= even_scale
                odd *= odd_scale
            weights = _weights(main_at, inside, k, start, in_words, even_out, even_in)
            even_weight, odd_weight = _numbers(weights, paired)
            main = _add_products(main, even_weight, odd_weight, even, odd, paired)
            if activation != "":
                weights = _weights(up_at, inside, k, start, in_words, even_out, even_in)
                even_weight, odd_weight = _numbers(weights, paired)
                up = _add_products(up, even_weight, odd_weight, even, odd, paired)
        y = tl.sum(main, 1)
        y_up = y
        if activation != "":
            y_up = tl.sum(up, 1)
        if has_norm:
            factor = tl.rsqrt(tl.sum(squares, 1) / in_features + eps)
            y *= factor
            y_up *= factor
        sums += (y,)
        up_sums += (y_up,)
    for row in tl.static_range(rows):
        target = out + row * out_stride
        y, y_up, before = sums[row], up_sums[row], befores[row]
        finish(y, y_up, before, bias, bias, target, n, inside, outs, False, has_bias, adds, activation)


@triton.jit
def _numbers(words: tl.tensor, paired: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Each word as float32; for a pair of bfloat16 values, which are upper halves of float32, both."""
    if paired:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    wide = words.to(tl.float32)
    return wide, wide


@triton.jit
def _add_products(
    total: tl.tensor, even: tl.tensor, odd: tl.tensor, even_by: tl.tensor, odd_by: tl.tensor, paired: tl.constexpr
) -> tl.tensor:
    total += even * even_by
    if paired:
        total += odd * odd_by
    return total


@triton.jit
def _weights(
    at: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    # Read only once: leave the cache to data that is read again.
    if even_out and even_in:
        return tl.load(at + start, eviction_policy="evict_first")
    mask = inside[:, None] & (start + k < in_features)[None, :]
    return tl.load(at + start, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _inputs(
    at: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.constexpr,
    copies: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    """[copies, inputs], each row the same."""
    at = tl.broadcast_to((at + start + k)[None, :], [copies, k.shape[0]])
    if even_in:
        return tl.load(at)
    return tl.load(at, mask=(start + k < in_features)[None, :], other=0)

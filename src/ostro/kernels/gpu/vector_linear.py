"""GEMV at memory speed, for one row or very few, with fused prologue and epilogue.

Multiplies and adds in float32, and keeps a program's weights in registers. The norm's factor is the same for the whole
row, so the result is scaled by it at the end instead of waiting for it at the start.

Every program norms and adds the prologue's delta for itself; the first one writes the sum.

For programmatic dependent launch (`pdl`) see `small_batch`. Knows shapes; knows no layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue, finish, previous
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.tilings import VectorTiling


def vector_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiling: VectorTiling,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it. A prologue with a delta takes a single row."""
    rows, in_features = x.shape
    assert prologue.delta is None or rows == 1
    outs = weight.shape[0] // epilogue.copies
    norm_weight, eps = prologue.norm_arguments(x)
    delta, delta_weight, stream, delta_eps, delta_multiplier = prologue.delta_arguments(x)
    if x.dtype == weight.dtype == torch.bfloat16 and in_features % 2 == x.stride(0) % 2 == 0:
        # Pairs stay packed in registers until they are multiplied: unpacking would have to wait for the loads, and
        # would come before the wait for the previous kernel.
        x, weight, norm_weight = pairs(x), pairs(weight), pairs(norm_weight)
        delta, delta_weight, stream = pairs(delta), pairs(delta_weight), pairs(stream)
    in_words = x.shape[1]
    unit = word_unit(in_words)
    block_words = max(1, tiling.ins * in_words // in_features)
    chunks = triton.cdiv(in_words, block_words)
    # At most 64 registers of weights per thread are loaded before the wait; the rest is loaded in a loop after it.
    bytes_a_chunk = tiling.outs * block_words * weight.element_size() * epilogue.copies
    held = min(chunks, max(1, 64 * 4 * 32 * tiling.warps // bytes_a_chunk))
    _vector_kernel[(triton.cdiv(outs, tiling.outs),)](
        x,
        weight,
        epilogue.bias_or(weight),
        norm_weight,
        delta,
        delta_weight,
        stream,
        out,
        eps,
        delta_eps,
        outs,
        x.stride(0),
        out.stride(0),
        in_words // unit,
        in_features,
        unit=unit,
        paired=in_words != in_features,
        rows=rows,
        block_out=tiling.outs,
        block_words=block_words,
        held=held,
        loops=held < chunks,
        warp_a_row=tiling.outs >= tiling.warps and block_words * weight.element_size() <= 512,
        even_out=outs % tiling.outs == 0,
        even_in=in_words % block_words == 0,
        has_norm=prologue.norm is not None,
        has_delta=prologue.delta is not None,
        delta_multiplier=delta_multiplier,
        **epilogue.flags,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        launch_pdl=pdl,
    )


def pairs(row: Tensor) -> Tensor:
    """Two values per word."""
    return row.view(torch.int32 if row.dtype == torch.bfloat16 else torch.int64)


def word_unit(words: int) -> int:
    """The largest known divisor of a row's words: the compiler loads 16 bytes at once only if it knows that every row
    begins at a multiple of 16 bytes.
    """
    return next(unit for unit in (16, 4, 1) if words % unit == 0)


@triton.jit(do_not_specialize=["in_units"])
def _vector_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    delta: tl.tensor,
    delta_weight: tl.tensor,
    stream: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    delta_eps: tl.tensor,
    outs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    in_units: tl.tensor,
    in_features: tl.tensor,
    unit: tl.constexpr,
    paired: tl.constexpr,
    rows: tl.constexpr,
    block_out: tl.constexpr,
    block_words: tl.constexpr,
    held: tl.constexpr,
    loops: tl.constexpr,
    warp_a_row: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    has_norm: tl.constexpr,
    has_delta: tl.constexpr,
    delta_multiplier: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    multiplier: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
    in_words = in_units * unit
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
        main_held += (load_weights(main_at, inside, k, chunk * block_words, in_words, even_out, even_in),)
        if gated:
            up_held += (load_weights(up_at, inside, k, chunk * block_words, in_words, even_out, even_in),)
        if has_norm:
            scale_held += (load_inputs(norm_weight, k, chunk * block_words, in_words, copies, even_in),)
    if pdl:
        gdc_wait()

    if has_delta:
        # All inputs are in flight before the sum of squares needs the first.
        delta_held = ()  # type: tuple[tl.tensor, ...]
        source_held = ()  # type: tuple[tl.tensor, ...]
        for chunk in tl.static_range(held):
            delta_held += (load_inputs(delta, k, chunk * block_words, in_words, copies, even_in),)
            source_held += (load_inputs(x, k, chunk * block_words, in_words, copies, even_in),)
        delta_squares = tl.zeros([copies, block_words], tl.float32)
        for chunk in tl.static_range(held):
            even, odd = numbers(delta_held[chunk], paired)
            delta_squares = add_products(delta_squares, even, odd, even, odd, paired)
        if loops:
            for start in range(held * block_words, in_words, block_words):
                even, odd = numbers(load_inputs(delta, k, start, in_words, copies, even_in), paired)
                delta_squares = add_products(delta_squares, even, odd, even, odd, paired)
        delta_factor = tl.rsqrt(tl.sum(delta_squares, 1) / in_features + delta_eps)[:, None] * delta_multiplier

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
            if has_delta:
                scales = load_inputs(delta_weight, k, chunk * block_words, in_words, copies, even_in)
                words = _joined(source_held[chunk], delta_held[chunk], scales, delta_factor, paired)
                _write(stream, words, k, chunk * block_words, in_words, copies)
            else:
                words = load_inputs(source, k, chunk * block_words, in_words, copies, even_in)
            even, odd = numbers(words, paired)
            if has_norm:
                squares = add_products(squares, even, odd, even, odd, paired)
                even_scale, odd_scale = numbers(scale_held[chunk], paired)
                even *= even_scale
                odd *= odd_scale
            even_weight, odd_weight = numbers(main_held[chunk], paired)
            main = add_products(main, even_weight, odd_weight, even, odd, paired)
            if gated:
                even_weight, odd_weight = numbers(up_held[chunk], paired)
                up = add_products(up, even_weight, odd_weight, even, odd, paired)
        if loops:
            for start in range(held * block_words, in_words, block_words):
                words = load_inputs(source, k, start, in_words, copies, even_in)
                if has_delta:
                    scales = load_inputs(delta_weight, k, start, in_words, copies, even_in)
                    added = load_inputs(delta, k, start, in_words, copies, even_in)
                    words = _joined(words, added, scales, delta_factor, paired)
                    _write(stream, words, k, start, in_words, copies)
                even, odd = numbers(words, paired)
                if has_norm:
                    squares = add_products(squares, even, odd, even, odd, paired)
                    scales = load_inputs(norm_weight, k, start, in_words, copies, even_in)
                    even_scale, odd_scale = numbers(scales, paired)
                    even *= even_scale
                    odd *= odd_scale
                weights = load_weights(main_at, inside, k, start, in_words, even_out, even_in)
                even_weight, odd_weight = numbers(weights, paired)
                main = add_products(main, even_weight, odd_weight, even, odd, paired)
                if gated:
                    weights = load_weights(up_at, inside, k, start, in_words, even_out, even_in)
                    even_weight, odd_weight = numbers(weights, paired)
                    up = add_products(up, even_weight, odd_weight, even, odd, paired)
        y = tl.sum(main, 1)
        y_up = y
        if gated:
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
        finish(
            y, y_up, before, bias, bias, target, n, inside, outs, False, has_bias, adds, activation, gated, multiplier
        )


@triton.jit
def _joined(
    words: tl.tensor, delta: tl.tensor, scales: tl.tensor, factor: tl.tensor, paired: tl.constexpr
) -> tl.tensor:
    """The sum in the form in which it is stored."""
    even, odd = numbers(words, paired)
    even_delta, odd_delta = numbers(delta, paired)
    even_scale, odd_scale = numbers(scales, paired)
    even += even_delta * factor * even_scale
    odd += odd_delta * factor * odd_scale
    if paired:
        low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        total = low | (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        total = even.to(words.dtype)
    return total


@triton.jit
def _write(
    at: tl.tensor, words: tl.tensor, k: tl.tensor, start: tl.tensor, in_features: tl.tensor, copies: tl.constexpr
) -> None:
    """Has the first program store its first copy."""
    at = tl.broadcast_to((at + start + k)[None, :], [copies, k.shape[0]])
    first = (tl.arange(0, copies) == 0) & (tl.program_id(0) == 0)
    tl.store(at, words, mask=first[:, None] & (start + k < in_features)[None, :])


@triton.jit
def numbers(words: tl.tensor, paired: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Each word as float32: for pairs, both values. bfloat16 values are upper halves of float32."""
    if not paired:
        even = words.to(tl.float32)
        odd = even
    elif words.dtype == tl.int64:
        even = words.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def add_products(
    total: tl.tensor, even: tl.tensor, odd: tl.tensor, even_by: tl.tensor, odd_by: tl.tensor, paired: tl.constexpr
) -> tl.tensor:
    total += even * even_by
    if paired:
        total += odd * odd_by
    return total


@triton.jit
def load_weights(
    at: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.tensor,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    # Read only once: leave the cache to data that is read again.
    if even_out and even_in:
        return tl.load(at + start, eviction_policy="evict_first")
    mask = inside[:, None] & (start + k < in_features)[None, :]
    return tl.load(at + start, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def load_inputs(
    at: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.tensor,
    copies: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    """[copies, inputs], each row the same."""
    at = tl.broadcast_to((at + start + k)[None, :], [copies, k.shape[0]])
    if even_in:
        return tl.load(at)
    return tl.load(at, mask=(start + k < in_features)[None, :], other=0)

"""Matmul with fp8 (e4m3) weights and one scale per output.

    weight [out, in]  ≈  small [out, in] · scale [out]          scale = largest of its row / 448

For many rows, each input row is rounded to 8 bits too, with its own scale, and cuBLAS does the matmul, or up to 256
rows `dot_linear`. For few rows, only reading the weights costs time, so inputs stay as they are and weights are widened
after they are read: for one row in the vector kernel below, for more in `dot_linear`. What `small_batch` says about
programmatic dependent launch applies here too.

Knows shapes; knows no layers. The plain twins end in `_plain`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.dot_linear import dot_linear
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue, finish, previous
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.small_batch import small_linear_plain
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling, Tiling, VectorTiling, default_dot_tiling
from ostro.kernels.gpu.vector_linear import word_unit

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite e4m3 value."""
SMALLEST_ROW = 1e-12
"""Lower bound for a row's largest magnitude, to avoid dividing by zero."""
MULTIPLE = 16
"""Inputs and outputs must be multiples of this, for cuBLAS."""
MOST_UNROUNDED = 16
"""The maximum number of rows whose inputs stay as they are."""
MOST_FEW = 64
"""The maximum number of rows for which `fp8_small_linear` was measured to be faster. It takes up to 256."""
# The tensor cores' own accumulators keep about 14 bits, so long sums would lose more than rounding the inputs does.
# Moving them to float32 every 128 inputs costs a little time and matches the plain twin.
FAST_ACCUMULATION = False
_WIDEST_BLOCK = 16384
_ROWS_AT_A_TIME = 4096


# --- rounding -------------------------------------------------------------------------------------------------------


def quantize_weight(weight: Tensor, agree: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """[out, in] -> the same in 8 bits, and the scales, float32 [out].

    If the weight is one rank's part of longer rows, `agree` turns its rows' largest magnitudes, [rows, 1], into those
    of the whole rows.
    """
    small = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    if weight.is_meta:
        # Nothing to convert, and torch takes seconds to import what computes shapes.
        return small, scale
    # In parts: converting the whole weight to float32 would take twice its memory.
    for part, rows, scales in zip(*(each.split(_ROWS_AT_A_TIME) for each in (weight, small, scale)), strict=True):
        rounded, by = quantize_rows_plain(part, agree)
        rows.copy_(rounded)
        scales.copy_(by[:, 0])
    return small, scale


def widened(small: Tensor, scale: Tensor) -> Tensor:
    """Dequantized to float32. `scale` is [rows] or [rows, 1]."""
    return small.float() * scale.view(-1, 1)


def quantize_rows(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """x [rows, width] -> the same in 8 bits, and a scale per row, float32 [rows, 1]."""
    rows, width = x.shape
    small = torch.empty(rows, width, dtype=FP8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(width), _WIDEST_BLOCK)
    _quantize_rows_kernel[(rows,)](
        x,
        small,
        scale,
        x.stride(0),
        width=width,
        block=block,
        smallest=SMALLEST_ROW,
        largest=LARGEST,
        pdl=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return small, scale


def quantize_rows_plain(x: Tensor, agree: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    wide = x.float()
    most = wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST_ROW)
    if agree is not None:
        most = agree(most)
    # With a Python number, torch would multiply by a reciprocal and round twice.
    largest = torch.full_like(most, LARGEST)
    return (wide * (largest / most)).clamp(-LARGEST, LARGEST).to(FP8), most / largest


@triton.jit
def _quantize_rows_kernel(
    x: tl.tensor,
    small: tl.tensor,
    scale: tl.tensor,
    x_stride: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    smallest: tl.constexpr,
    largest: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    x += row * x_stride
    small += row * width
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    if block >= width:
        value = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(value)), smallest)
        tl.store(small + column, _rounded(value, most, largest, small.dtype.element_ty), mask=column < width)
    else:
        mosts = tl.zeros([block], tl.float32)
        for start in range(0, width, block):
            value = tl.load(x + start + column, mask=start + column < width, other=0.0).to(tl.float32)
            mosts = tl.maximum(mosts, tl.abs(value))
        most = tl.maximum(tl.max(mosts), smallest)
        for start in range(0, width, block):
            mask = start + column < width
            value = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(small + start + column, _rounded(value, most, largest, small.dtype.element_ty), mask=mask)
    tl.store(scale + row, tl.div_rn(most, largest))


@triton.jit
def _rounded(value: tl.tensor, most: tl.tensor, largest: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    value *= tl.div_rn(largest, most)
    # The clamp propagates NaN: a row that contains one must not come out finite.
    return tl.clamp(value, -largest, largest, propagate_nan=tl.PropagateNan.ALL).to(dtype)


# --- many rows ------------------------------------------------------------------------------------------------------


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """x [rows, in], weight in 8 bits [out, in] with its scales [out] -> [rows, out] in x's dtype, of 16 bits.

    In and out must be multiples of MULTIPLE.
    """
    small, by = quantize_rows(x, pdl=pdl)
    if x.device.type == "cpu":
        return _matmul_plain(small, by, weight, scale, bias, x.dtype)
    return torch._scaled_mm(
        small,
        weight.T,
        scale_a=by,
        scale_b=scale.view(1, -1),
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )


def fp8_linear_plain(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return _matmul_plain(*quantize_rows_plain(x), weight, scale, bias, x.dtype)


def _matmul_plain(
    small: Tensor, by: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return small_linear_plain(widened(small, by), widened(weight, scale), epilogue=Epilogue(bias), out_dtype=dtype)


# --- few rows -------------------------------------------------------------------------------------------------------


def default_tiling(rows: int, out_features: int, in_features: int, *, gated: bool) -> Tiling:
    """`out_features` counts the weight's rows, both gate and up."""
    width = triton.next_power_of_2(in_features)
    if rows == 1:
        if in_features > 4096:
            return VectorTiling(outs=1, ins=2048, warps=4)
        # Each warp has its own rows of weights, two of them if they are short.
        return VectorTiling(outs=8 if in_features <= 1024 and not gated else 4, ins=min(width, 512), warps=4)
    outs = out_features // (2 if gated else 1)
    if rows <= MOST_UNROUNDED:
        # The inputs and the converted weights take at most 2 bytes per element.
        return default_dot_tiling(rows, outs, in_features, gated=gated)
    tiling = default_dot_tiling(rows, outs, in_features, gated=gated, bits=8)
    # The sums of 256 rows fill the registers of two groups of warps.
    return replace(tiling, warps=8 if rows > 128 else 4)


def fp8_small_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    residual: Tensor | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight in 8 bits [out, in] with its scales [out] -> [rows, out], for 1 to 256 rows.

    More than MOST_UNROUNDED rows are rounded to 8 bits first. A prologue takes one row, and no delta. Where the
    epilogue adds, the result is added to the `residual` [rows, out] in place, and it is returned.

    The first call on a device must not be inside a graph capture: it allocates the counters of split matmuls.
    """
    rows, in_features = x.shape
    assert 1 <= rows <= MOST_ROWS
    assert weight.is_contiguous()
    assert in_features % MULTIPLE == 0
    tiling = tiling or default_tiling(rows, weight.shape[0], in_features, gated=epilogue.gated)
    out = epilogue.target(x, weight.shape[0], residual)
    if isinstance(tiling, VectorTiling):
        assert rows == 1
        _fp8_vector(x, weight, scale, out, tiling, prologue, epilogue, pdl=pdl)
    else:
        assert isinstance(tiling, DotTiling)
        assert prologue.is_empty
        by = None
        if rows > MOST_UNROUNDED:
            x, by = quantize_rows(x, pdl=pdl)
        dot_linear(x, weight, out, tiling, epilogue, scale=scale, x_scale=by, pdl=pdl)
    return out


def fp8_small_linear_plain(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    dtype = x.dtype
    if len(x) > MOST_UNROUNDED:
        x = widened(*quantize_rows_plain(x))
    return small_linear_plain(x, widened(weight, scale), prologue, epilogue, residual=residual, out_dtype=dtype)


def _fp8_vector(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    tiling: VectorTiling,
    prologue: Prologue,
    epilogue: Epilogue,
    *,
    pdl: bool,
) -> None:
    assert prologue.delta is None
    outs = weight.shape[0] // epilogue.copies
    in_words = x.shape[1] // 4
    unit = word_unit(in_words)
    norm_weight, eps = prologue.norm_arguments(x)
    block_words = max(1, tiling.ins // 4)
    chunks = triton.cdiv(in_words, block_words)
    # At most 64 registers of weights per thread are loaded before the wait; the rest is loaded in a loop after it.
    bytes_a_chunk = tiling.outs * block_words * 4 * epilogue.copies
    held = min(chunks, max(1, 64 * 4 * 32 * tiling.warps // bytes_a_chunk))
    _vector_kernel[(triton.cdiv(outs, tiling.outs),)](
        _quads(x),
        weight.view(torch.int32),
        scale,
        epilogue.bias_or(scale),
        _quads(norm_weight),
        out,
        eps,
        outs,
        in_words // unit,
        unit=unit,
        block_out=tiling.outs,
        block_words=block_words,
        held=held,
        loops=held < chunks,
        even_out=outs % tiling.outs == 0,
        even_in=in_words % block_words == 0,
        has_norm=prologue.norm is not None,
        **epilogue.flags,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        launch_pdl=pdl,
    )


def _quads(row: Tensor) -> Tensor:
    """Four bfloat16 values per word, like the weights: one load instead of four."""
    return row.view(torch.int64) if row.dtype == torch.bfloat16 else row


@triton.jit(do_not_specialize=["in_units"])
def _vector_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    outs: tl.tensor,
    in_units: tl.tensor,
    unit: tl.constexpr,
    block_out: tl.constexpr,
    block_words: tl.constexpr,
    held: tl.constexpr,
    loops: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    has_norm: tl.constexpr,
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
    # Each thread loads its own weights' inputs, even if others load the same: no exchange between threads.
    k = tl.broadcast_to(tl.arange(0, block_words)[None, :], [block_out, block_words])
    inside = n < outs
    main_at = weight + n.to(tl.int64)[:, None] * in_words + tl.arange(0, block_words)[None, :]
    up_at = main_at + outs.to(tl.int64) * in_words

    # Words stay packed until they are multiplied: unpacking would have to wait for the loads, and would come before the
    # wait for the previous kernel.
    main_held = ()  # type: tuple[tl.tensor, ...]
    up_held = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(held):
        main_held += (_weights(main_at, inside, chunk * block_words, in_words, even_out, even_in),)
        if gated:
            up_held += (_weights(up_at, inside, chunk * block_words, in_words, even_out, even_in),)
    if pdl:
        gdc_wait()

    before = previous(out + n, inside, adds)
    main = tl.zeros([block_out, block_words], tl.float32)
    up = tl.zeros([block_out, block_words], tl.float32)
    squares = tl.zeros([block_out, block_words], tl.float32)
    for chunk in tl.static_range(held):
        inputs, squares = _inputs(x, norm_weight, k, chunk * block_words, in_words, squares, has_norm, even_in)
        main = _add_products(main, main_held[chunk], inputs)
        if gated:
            up = _add_products(up, up_held[chunk], inputs)
    if loops:
        for start in range(held * block_words, in_words, block_words):
            inputs, squares = _inputs(x, norm_weight, k, start, in_words, squares, has_norm, even_in)
            main = _add_products(main, _weights(main_at, inside, start, in_words, even_out, even_in), inputs)
            if gated:
                up = _add_products(up, _weights(up_at, inside, start, in_words, even_out, even_in), inputs)
    # _halves returns weights divided by 256.
    y = tl.sum(main, 1) * 256.0
    y_up = tl.sum(up, 1) * 256.0
    if has_norm:
        # The norm's factor is the same for the whole row, so it can be applied last.
        factor = tl.rsqrt(tl.sum(squares, 1) / (4 * in_words) + eps)
        y *= factor
        y_up *= factor
    finish(y, y_up, before, scale, bias, out, n, inside, outs, True, has_bias, adds, activation, gated, multiplier)


@triton.jit
def _inputs(
    x: tl.tensor,
    norm_weight: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_words: tl.tensor,
    squares: tl.tensor,
    has_norm: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:
    """The inputs for the four weights in each word, times the norm's weight; and the sum of squares so far."""
    a, b, c, d = _four(x, k + start, in_words, even_in)
    if has_norm:
        squares += a * a + b * b + c * c + d * d
        e, f, g, h = _four(norm_weight, k + start, in_words, even_in)
        a *= e
        b *= f
        c *= g
        d *= h
    return (a, b, c, d), squares


@triton.jit
def _four(
    at: tl.tensor, k: tl.tensor, in_words: tl.tensor, even_in: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Elements 4 k to 4 k + 3, in float32. bfloat16 values, four per word, are the upper halves of float32."""
    if at.dtype.element_ty == tl.int64:
        word = tl.load(at + k) if even_in else tl.load(at + k, mask=k < in_words, other=0)
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        a, b = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
        c, d = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    else:
        a = tl.load(at + 4 * k, mask=k < in_words, other=0.0).to(tl.float32)
        b = tl.load(at + 4 * k + 1, mask=k < in_words, other=0.0).to(tl.float32)
        c = tl.load(at + 4 * k + 2, mask=k < in_words, other=0.0).to(tl.float32)
        d = tl.load(at + 4 * k + 3, mask=k < in_words, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _add_products(total: tl.tensor, words: tl.tensor, inputs: tl.tuple) -> tl.tensor:
    """Adds the products of a word's four weights with their inputs."""
    first, third = _halves(words << 8)
    second, fourth = _halves(words)
    total += first * inputs[0]
    total += second * inputs[1]
    total += third * inputs[2]
    total += fourth * inputs[3]
    return total


@triton.jit
def _halves(words: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The second and fourth byte of each word as e4m3 values, divided by 256.

    In float16, sign, exponent and mantissa are in the same order, with a zero before the exponent and zeros after the
    mantissa, and with an exponent bias that is 8 larger: s eeee mmm -> s 0eeee mmm0000000.
    """
    pair = ((words >> 1) & 0x3F803F80) | (words & -2147450880)
    low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _weights(
    at: tl.tensor,
    inside: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    # Read only once: leave the cache to data that is read again.
    if even_out and even_in:
        return tl.load(at + start, eviction_policy="evict_first")
    mask = inside[:, None] & (start + tl.arange(0, at.shape[1]) < width)[None, :]
    return tl.load(at + start, mask=mask, other=0.0, eviction_policy="evict_first")

"""Products of a few rows with a weight, at the speed of memory, with what stands before and after them folded in.

    x ──(norm)──> · weightᵀ ──(+ bias)──┬──────────────────> out
                                        ├─(+ residual)─────> residual, in place
                                        └─ act(gate) * up ─> out, where the weight holds gate above up

Two kernels. The vector kernel multiplies and adds in float32 and keeps all of its weights in registers; the dot kernel
feeds the tensor cores, all rows in one tile. A row's result never depends on the rows beside it. The norm's factor is
the same for the whole row, so the product is scaled by it at the end instead of waiting for it at the start.

Programmatic dependent launch (`pdl`): a program starts while the kernel before it still runs, fetches its weights,
which no kernel writes, and only then waits until the kernel before has ended and its writes are visible. A kernel that
has waited may rely on everything earlier in the stream, because each kernel waits before it ends: so every kernel
launched this way must wait, and none may read or write anything but weights before that.

Knows shapes; knows no layers. The plain twin is `small_linear_plain`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.mlp import PLAIN, activate

MOST_ROWS = 256
MOST_TILES = 65536


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut into programs. Powers of two."""

    outs: int
    """Outputs of a program; where it holds gate and up, of each."""
    ins: int
    """Inputs read at a time."""
    warps: int
    stages: int = 1
    """Of the dot kernel's pipeline."""
    splits: int = 1
    """Programs that share the inputs of one output: dot kernel, without norm. Their sums are joined in order."""
    held: int = 0
    """Blocks of weights that the dot kernel asks for before it waits for the kernel before it."""
    weights_first: bool = False
    """Whether the dot kernel multiplies weights by rows instead of rows by weights: then the matrix units read the
    weights from shared memory themselves, 64 outputs at a time."""
    dot: bool = False


TILINGS: Mapping[tuple[int, int, int], Tiling] = {
    (1, 4096, 1024): Tiling(4, 256, 2),
    (1, 1024, 2048): Tiling(8, 256, 4),
    (1, 6144, 1024): Tiling(4, 256, 4),
    (1, 1024, 3072): Tiling(8, 256, 8),
    (1, 151936, 1024): Tiling(8, 256, 8),
    (1, 6144, 4096): Tiling(2, 1024, 4),
    (1, 4096, 4096): Tiling(2, 1024, 4),
    (1, 28672, 4096): Tiling(1, 1024, 4),
    (1, 4096, 14336): Tiling(2, 2048, 8),
    (1, 128256, 4096): Tiling(1, 1024, 4),
    (2, 4096, 1024): Tiling(4, 256, 4),
    (2, 1024, 2048): Tiling(64, 128, 4, stages=3, splits=8, held=2, dot=True),
    (2, 6144, 1024): Tiling(32, 128, 4, stages=4, dot=True),
    (2, 1024, 3072): Tiling(4, 256, 4),
    (2, 151936, 1024): Tiling(2, 256, 2),
    (4, 4096, 1024): Tiling(4, 256, 4),
    (4, 1024, 2048): Tiling(64, 128, 4, stages=3, splits=8, held=2, dot=True),
    (4, 6144, 1024): Tiling(32, 128, 4, stages=4, dot=True),
    (4, 1024, 3072): Tiling(2, 1024, 4),
    (4, 151936, 1024): Tiling(64, 128, 4, stages=3, held=2, dot=True),
    (16, 4096, 1024): Tiling(128, 128, 4, stages=3, splits=4, held=2, weights_first=True, dot=True),
    (16, 1024, 2048): Tiling(16, 128, 4, stages=4, splits=4, dot=True),
    (16, 6144, 1024): Tiling(64, 128, 4, stages=4, weights_first=True, dot=True),
    (16, 1024, 3072): Tiling(64, 128, 4, stages=4, splits=4, held=2, weights_first=True, dot=True),
    (16, 151936, 1024): Tiling(128, 128, 4, stages=3, weights_first=True, dot=True),
    (16, 6144, 4096): Tiling(128, 128, 4, stages=3, splits=4, held=2, weights_first=True, dot=True),
    (16, 4096, 4096): Tiling(128, 128, 4, stages=3, splits=4, held=2, weights_first=True, dot=True),
    (16, 28672, 4096): Tiling(64, 64, 4, stages=6, held=2, weights_first=True, dot=True),
    (16, 4096, 14336): Tiling(64, 128, 4, stages=3, splits=4, held=2, weights_first=True, dot=True),
    (16, 128256, 4096): Tiling(128, 128, 4, stages=3, weights_first=True, dot=True),
    (64, 4096, 1024): Tiling(64, 128, 4, stages=3, held=1, weights_first=True, dot=True),
    (64, 1024, 2048): Tiling(64, 128, 4, stages=3, splits=4, held=1, weights_first=True, dot=True),
    (64, 6144, 1024): Tiling(64, 64, 4, stages=5, weights_first=True, dot=True),
    (64, 1024, 3072): Tiling(64, 128, 4, stages=3, splits=4, held=1, weights_first=True, dot=True),
    (64, 151936, 1024): Tiling(128, 64, 8, stages=3, weights_first=True, dot=True),
}
"""Where these kernels beat the library's, on an H200, and how; by (at most so many rows, out, in). See
bench/kernels/linear.py."""
ROWS = (1, 2, 4, 16, 64)


def measured(rows: int, out_features: int, in_features: int) -> Tiling | None:
    """The tiling that was found best for a product; None where none was, or where the library's product is faster."""
    keys = ((most, out_features, in_features) for most in ROWS if rows <= most)
    return next((TILINGS[key] for key in keys if key in TILINGS), None)


def default_tiling(rows: int, out_features: int, in_features: int, *, gated: bool, normed: bool) -> Tiling:
    """Where nothing was measured. `out_features` counts the weight's rows, gate and up both."""
    width = triton.next_power_of_2(in_features)
    if rows == 1:
        if in_features <= 3072:  # A row of weights fits the registers of a warp.
            warps = 4 if out_features >= 4096 else 2
            return Tiling(outs=warps, ins=min(width, 256), warps=warps)
        # Some 16 KB of weights a program: a few programs on each multiprocessor keep enough reads in flight.
        outs = max(1, 8192 // width) // (2 if gated and width < 8192 else 1)
        warps = 8 if in_features > 8192 else 4
        return Tiling(outs=outs, ins=min(width, 256 * warps), warps=warps)
    if rows > 16:
        return Tiling(outs=64, ins=min(max(width, 16), 64), warps=8, stages=3, weights_first=True, dot=True)
    outs = 16 if out_features <= 8192 else 32
    programs = out_features // (outs * (2 if gated else 1))
    splits = 4 if programs < 128 and in_features % 1024 == 0 and not (gated or normed) else 1
    return Tiling(outs=outs, ins=min(max(width, 16), 128), warps=4, stages=4, splits=splits, dot=True)


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for 1 to 256 rows.

    `norm` (weight, eps) is an RMSNorm of x before the product. With `residual` [rows, out] the result is added to it in
    place, and it is returned. With `activation`, a name in PLAIN, the weight is gate above up and the result
    act(gate) * up, [rows, out / 2].

    The first call on a device must not be inside a graph capture: it makes the counters of split products.
    """
    rows, in_features = x.shape
    gated = activation is not None
    outs = weight.shape[0] // (2 if gated else 1)
    assert 1 <= rows <= MOST_ROWS
    assert not (gated and residual is not None)
    assert weight.is_contiguous()
    if tiling is None:
        tiling = measured(rows, weight.shape[0], in_features) or default_tiling(
            rows, weight.shape[0], in_features, gated=gated, normed=norm is not None
        )
    out = residual
    if out is None:
        out = torch.empty(rows, outs, dtype=out_dtype or x.dtype, device=x.device)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    run = _run_dot if tiling.dot else _run_vector
    run(x, weight, bias, norm_weight, out, eps, outs, norm is not None, residual is not None, activation, tiling, pdl)
    return out


def small_linear_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1]) * norm[0].float()
    y = wide @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = PLAIN[activation](gate) * up
    if residual is not None:
        return residual.copy_(residual.float() + y)
    return y.to(out_dtype or x.dtype)


def _run_vector(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    out: Tensor,
    eps: float,
    outs: int,
    has_norm: bool,
    adds: bool,
    activation: str | None,
    tiling: Tiling,
    pdl: bool,
) -> None:
    rows, in_features = x.shape
    if x.dtype == weight.dtype == norm_weight.dtype == torch.bfloat16 and in_features % 2 == x.stride(0) % 2 == 0:
        # Pairs stay packed in registers until they are multiplied. Unpacking would have to wait for the reads, and
        # would stand before the wait for the kernel before.
        x, weight, norm_weight = x.view(torch.int32), weight.view(torch.int32), norm_weight.view(torch.int32)
    in_words = x.shape[1]
    block_words = max(1, tiling.ins * in_words // in_features)
    chunks = triton.cdiv(in_words, block_words)
    # At most 64 registers of weights a thread are held over the wait; the rest, if any, is read in a loop after it.
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
        has_norm=has_norm,
        has_bias=bias is not None,
        adds=adds,
        activation=activation or "",
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        launch_pdl=pdl,
    )


def _run_dot(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    out: Tensor,
    eps: float,
    outs: int,
    has_norm: bool,
    adds: bool,
    activation: str | None,
    tiling: Tiling,
    pdl: bool,
) -> None:
    rows, in_features = x.shape
    tiles, splits = triton.cdiv(outs, tiling.outs), tiling.splits
    # Each split would know only its part of the row's mean square.
    assert splits == 1 or not (has_norm or activation)
    assert tiles <= MOST_TILES
    block_rows = max(16, triton.next_power_of_2(rows))
    partials, counters = x, x
    if splits > 1:
        partials = torch.empty(splits, block_rows, outs, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    ins_a_split = triton.cdiv(in_features, splits * tiling.ins) * tiling.ins
    _dot_kernel[(tiles, splits)](
        x,
        weight,
        weight if bias is None else bias,
        norm_weight,
        out,
        partials,
        counters,
        eps,
        rows,
        outs,
        x.stride(0),
        out.stride(0),
        in_features=in_features,
        ins_a_split=ins_a_split,
        block_rows=block_rows,
        block_out=tiling.outs,
        block_in=tiling.ins,
        splits=splits,
        held=min(tiling.held, ins_a_split // tiling.ins),
        weights_first=tiling.weights_first,
        even_out=outs % tiling.outs == 0,
        has_norm=has_norm,
        # The row times the norm's weight may overflow float16 unless it is scaled down first.
        norms_first=x.dtype == torch.float16,
        has_bias=bias is not None,
        adds=adds,
        activation=activation or "",
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """How many programs of a tile have arrived: zero between kernels. Shared, as kernels of a stream run in turn."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


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
    # Where a warp has a row of weights to itself it reads the inputs itself: no exchange between warps.
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

    # Nothing is stored before the last read, lest a row's reads wait for the store of the row before.
    previous = ()  # type: tuple[tl.tensor, ...]
    sums = ()  # type: tuple[tl.tensor, ...]
    up_sums = ()  # type: tuple[tl.tensor, ...]
    for row in tl.static_range(rows):
        previous += (_previous(out + row * out_stride + n, inside, adds),)
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
        _finish(sums[row], up_sums[row], previous[row], bias, target, n, inside, outs, has_bias, adds, activation)


@triton.jit
def _numbers(words: tl.tensor, paired: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The float32 of each word; of a pair of bfloat16, which are the upper halves of float32, of either."""
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


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    in_features: tl.constexpr,
    ins_a_split: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    splits: tl.constexpr,
    held: tl.constexpr,
    weights_first: tl.constexpr,
    even_out: tl.constexpr,
    has_norm: tl.constexpr,
    norms_first: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
    even_in: tl.constexpr = in_features % (splits * block_in) == 0
    split = tl.program_id(1)
    begin = split * ins_a_split
    m = tl.arange(0, block_rows)
    n = tl.program_id(0) * block_out + tl.arange(0, block_out)
    k = tl.arange(0, block_in)
    inside = n < outs
    main_at = weight + n.to(tl.int64)[:, None] * in_features
    up_at = main_at + outs.to(tl.int64) * in_features
    main_at += k[None, :]
    up_at += k[None, :]
    main_held = ()  # type: tuple[tl.tensor, ...]
    up_held = ()  # type: tuple[tl.tensor, ...]
    for block in tl.static_range(held):
        main_held += (_weights(main_at, inside, k, begin + block * block_in, in_features, even_out, even_in),)
        if activation != "":
            up_held += (_weights(up_at, inside, k, begin + block * block_in, in_features, even_out, even_in),)
    if pdl:
        gdc_wait()

    source = x + m[:, None] * x_stride + k[None, :]
    present = (m < rows)[:, None]
    factor = tl.full([block_rows], 1.0, tl.float32)
    if has_norm and norms_first:
        squares = tl.zeros([block_rows, block_in], tl.float32)
        for start in range(0, in_features, block_in):
            value = _rows(source, present, k, start, in_features, even_in).to(tl.float32)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, 1) / in_features + eps)

    target = out + m[:, None] * out_stride
    keep = present & inside[None, :]
    previous = _previous(target + n[None, :], keep, adds)
    if weights_first:
        main = tl.zeros([block_out, block_rows], tl.float32)
    else:
        main = tl.zeros([block_rows, block_out], tl.float32)
    up = main
    squares = tl.zeros([block_rows, block_in], tl.float32)
    # A last split may lie partly or wholly beyond the inputs: it adds zeros.
    for block in tl.static_range(held):
        start = begin + block * block_in
        value = _rows(source, present, k, start, in_features, even_in)
        if has_norm:
            scale = _inputs(norm_weight, k, start, in_features, 1, even_in)
            value, squares = _scaled(value, scale, squares, factor, norms_first)
        main = _add_dot(main, value, main_held[block], weights_first)
        if activation != "":
            up = _add_dot(up, value, up_held[block], weights_first)
    for step in range(held * block_in, ins_a_split, block_in):
        start = begin + step
        value = _rows(source, present, k, start, in_features, even_in)
        if has_norm:
            scale = _inputs(norm_weight, k, start, in_features, 1, even_in)
            value, squares = _scaled(value, scale, squares, factor, norms_first)
        weights = _weights(main_at, inside, k, start, in_features, even_out, even_in)
        main = _add_dot(main, value, weights, weights_first)
        if activation != "":
            weights = _weights(up_at, inside, k, start, in_features, even_out, even_in)
            up = _add_dot(up, value, weights, weights_first)
    if weights_first:
        main = main.T
        up = up.T
    if has_norm and not norms_first:
        factor = tl.rsqrt(tl.sum(squares, 1) / in_features + eps)
        main *= factor[:, None]
        up *= factor[:, None]

    if splits == 1:
        _finish(main, up, previous, bias, target, n[None, :], keep, outs, has_bias, adds, activation)
    else:
        # The last program to arrive adds all parts up, its own too, always in the same order.
        part = partials + m[:, None] * outs + n[None, :]
        tl.store(part + split.to(tl.int64) * block_rows * outs, main, mask=keep)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            total = tl.zeros([block_rows, block_out], tl.float32)
            for other in tl.static_range(splits):
                total += tl.load(part + other * block_rows * outs, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(counters + tl.program_id(0), 0)
            _finish(total, total, previous, bias, target, n[None, :], keep, outs, has_bias, adds, activation)


@triton.jit
def _add_dot(total: tl.tensor, rows: tl.tensor, weights: tl.tensor, weights_first: tl.constexpr) -> tl.tensor:
    if weights_first:
        total = tl.dot(weights, rows.T, total, input_precision="ieee")
    else:
        total = tl.dot(rows, weights.T, total, input_precision="ieee")
    return total


@triton.jit
def _scaled(
    value: tl.tensor, scale: tl.tensor, squares: tl.tensor, factor: tl.tensor, norms_first: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The inputs times the norm's weight, and the sum of squares so far unless the norm's factor is known already."""
    wide = value.to(tl.float32)
    if norms_first:
        wide *= factor[:, None]
    else:
        squares += wide * wide
    return (wide * scale.to(tl.float32)).to(value.dtype), squares


@triton.jit
def _finish(
    y: tl.tensor,
    y_up: tl.tensor,
    previous: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    mask: tl.tensor,
    outs: tl.tensor,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
) -> None:
    if has_bias:
        y += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)
    if activation != "":
        if has_bias:
            y_up += tl.load(bias + outs + n, mask=n < outs, other=0.0).to(tl.float32)
        y = activate(y, activation) * y_up
    if adds:
        y += previous
    tl.store(out + n, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _previous(at: tl.tensor, mask: tl.tensor, adds: tl.constexpr) -> tl.tensor:
    if adds:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.zeros(at.shape, tl.float32)


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
    # Read once: leave the cache to what is read again.
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


@triton.jit
def _rows(
    at: tl.tensor,
    present: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    if even_in:
        return tl.load(at + start, mask=present, other=0.0)
    return tl.load(at + start, mask=present & (start + k < in_features)[None, :], other=0.0)

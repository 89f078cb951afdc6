"""Matmul of 2 to 16 rows at memory speed, on tensor cores, with fused prologue and epilogue.

A program computes a few outputs from all of their inputs: there are no splits to add up, and no pipeline to fill. Its
weights go from memory to registers before the wait for the previous kernel, and from there straight to the tensor
cores, each warp multiplying inputs of its own:

    memory     16 bytes, 8 inputs, per thread; 4 threads per row, 8 rows per warp at a time
    m16n8k16   the same thread holds the same numbers, if the 32 inputs are taken in another order: see `_operand`

The order of the inputs is free as long as weights and rows agree on it. With another layout the compiler would exchange
the numbers through shared memory, to the same result; a test looks for that.

The norm's factor is the same for the whole row, so the result is scaled by it at the end. Until then rows are
multiplied by the norm's weight alone, which fits into bfloat16, but not into float16.

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
from ostro.kernels.gpu.tilings import MOST_SLICE_ROWS, SLICE_WIDTH, SliceTiling, slice_rows

# Sums that are added to by turns: one alone would wait for itself.
_CHAINS = 4


def slice_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiling: SliceTiling,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it."""
    rows, in_features = x.shape
    outs, chunks = weight.shape[0] // epilogue.copies, tiling.ins // (SLICE_WIDTH * tiling.warps)
    assert rows <= MOST_SLICE_ROWS
    assert tiling.ins == chunks * SLICE_WIDTH * tiling.warps
    assert x.dtype == weight.dtype
    assert x.dtype != torch.float16 or prologue.norm is None, "the factor comes too late for float16"
    norm_weight, eps = prologue.norm_arguments(x)
    delta, delta_weight, stream, delta_eps, delta_multiplier = prologue.delta_arguments(x)
    _slice_kernel[(triton.cdiv(outs, tiling.outs),)](
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
        rows,
        outs,
        x.stride(0),
        delta.stride(0),
        stream.stride(0),
        out.stride(0),
        in_features,
        width=SLICE_WIDTH,
        block_rows=slice_rows(rows),
        block_out=tiling.outs,
        copies=epilogue.copies,
        chunks=chunks,
        warps=tiling.warps,
        chains=max(1, _CHAINS * 128 // (tiling.outs * epilogue.copies * slice_rows(rows))),
        loops=in_features > tiling.ins,
        even_out=outs % tiling.outs == 0,
        even_in=in_features % tiling.ins == 0,
        has_norm=prologue.norm is not None,
        has_delta=prologue.delta is not None,
        delta_multiplier=delta_multiplier,
        **epilogue.flags,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["rows"])
def _slice_kernel(
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
    rows: tl.tensor,
    outs: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    stream_stride: tl.tensor,
    out_stride: tl.tensor,
    in_features: tl.tensor,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    copies: tl.constexpr,
    chunks: tl.constexpr,
    warps: tl.constexpr,
    chains: tl.constexpr,
    loops: tl.constexpr,
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
    group: tl.constexpr = chunks * width * warps
    first = tl.program_id(0) * block_out
    # The rows of gate, then those of up.
    place, k_weight = _places(copies * block_out, warps, chunks, width)
    column = first + place % block_out
    inside = (column < outs)[:, None]
    weight_at = weight + (column + place // block_out * outs).to(tl.int64)[:, None] * in_features + k_weight
    held = _load_weights(weight_at, inside, k_weight, 0, in_features, chunks, width, even_out, even_in)

    row, k = _places(block_rows, warps, chunks, width)
    own = (row < rows)[:, None]
    # Beyond the rows, the last one is read again: its results are not stored.
    row = tl.minimum(row, rows - 1).to(tl.int64)[:, None]
    x_at, delta_at, stream_at = x + row * x_stride + k, delta + row * delta_stride + k, stream + row * stream_stride + k
    scales = ()  # type: tuple[tl.tensor, ...]
    if has_norm and not loops:
        scales = _load_scales(norm_weight, 0, in_features, block_rows, warps, chunks, width, even_in)
    if pdl:
        gdc_wait()

    m, n = tl.arange(0, block_rows), first + tl.arange(0, block_out)
    target = out + m[None, :] * out_stride
    keep = (n < outs)[:, None] & (m < rows)[None, :]
    before = previous(target + n[:, None], keep, adds)

    factor = tl.zeros([block_rows * warps, 1], tl.float32)
    if has_delta:
        squares = tl.zeros([block_rows * warps, width], tl.float32)
        for start in range(0, in_features, group):
            added = _load_rows(delta_at, k, start, in_features, chunks, width, even_in)
            for chunk in tl.static_range(chunks):
                squares += added[chunk].to(tl.float32) * added[chunk].to(tl.float32)
        sums_of_rows = tl.rsqrt(_by_row(squares, block_rows, warps) / in_features + delta_eps) * delta_multiplier
        factor = _for_warps(sums_of_rows, block_rows, warps)

    sums = ()  # type: tuple[tl.tensor, ...]
    for _ in tl.static_range(chains):
        sums += (tl.zeros([warps, copies * block_out, block_rows], tl.float32),)
    squares = tl.zeros([block_rows * warps, width], tl.float32)
    last = 0
    if loops:
        # The next group's weights are loaded while this one is multiplied.
        for start in range(0, in_features - group, group):
            following = _load_weights(
                weight_at, inside, k_weight, start + group, in_features, chunks, width, even_out, even_in
            )
            part = _load_rows(x_at, k, start, in_features, chunks, width, even_in)
            if has_delta:
                part = _joined(
                    part, delta_at, delta_weight, stream_at, factor, own, k, start, in_features, chunks, width, even_in
                )
            if has_norm:
                by = _load_scales(norm_weight, start, in_features, block_rows, warps, chunks, width, even_in)
                part, squares = _scaled(part, by, squares)
            sums = _add_products(sums, held, part, copies * block_out, block_rows, warps)
            held = following
        last = (in_features - 1) // group * group
        if has_norm:
            scales = _load_scales(norm_weight, last, in_features, block_rows, warps, chunks, width, even_in)
    values = _load_rows(x_at, k, last, in_features, chunks, width, even_in)
    if has_delta:
        values = _joined(
            values, delta_at, delta_weight, stream_at, factor, own, k, last, in_features, chunks, width, even_in
        )
    if has_norm:
        values, squares = _scaled(values, scales, squares)
    sums = _add_products(sums, held, values, copies * block_out, block_rows, warps)

    total = sums[0]
    for chain in tl.static_range(1, chains):
        total += sums[chain]
    y = tl.sum(total, 0)
    if has_norm:
        y *= tl.rsqrt(_by_row(squares, block_rows, warps) / in_features + eps)[None, :]
    y_up = y
    if gated:
        y, y_up = tl.split(tl.permute(tl.reshape(y, [2, block_out, block_rows]), [1, 2, 0]))
    finish(
        y,
        y_up,
        before,
        bias,
        bias,
        target,
        n[:, None],
        keep,
        outs,
        False,
        has_bias,
        adds,
        activation,
        gated,
        multiplier,
    )


@triton.jit
def _places(
    rows: tl.constexpr, warps: tl.constexpr, chunks: tl.constexpr, width: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The row and the first chunk's inputs of each place of a tile [rows * warps, width]. The compiler gives a warp 8
    rows of a tile at a time: here all of them are rows of the same inputs.
    """
    place = tl.arange(0, rows * warps)
    row = place // (8 * warps) * 8 + place % 8
    warp = place // 8 % warps
    return row, warp[:, None] * (chunks * width) + tl.arange(0, width)[None, :]


@triton.jit
def _operand(tile: tl.tensor, rows: tl.constexpr, warps: tl.constexpr) -> tl.tensor:
    """[rows * warps, 32] -> [warps, rows, 32], with the inputs in the order in which the threads that hold them are to
    have them for two m16n8k16 in turn: of the 8 that one of 4 threads holds, 4 each, in two pairs that are 8 apart.
    """
    tile = tl.reshape(tile, [rows // 8, warps, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [1, 0, 2, 4, 5, 3, 6]), [warps, rows, 32])


@triton.jit
def _add_products(
    sums: tl.tuple,
    weights: tl.tuple,
    values: tl.tuple,
    outs: tl.constexpr,
    rows: tl.constexpr,
    warps: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The sums by turns, the next to be added to first."""
    for chunk in tl.static_range(len(weights)):
        inputs = tl.permute(_operand(values[chunk], rows, warps), [0, 2, 1])
        added = tl.dot(_operand(weights[chunk], outs, warps), inputs, sums[0], input_precision="ieee")
        sums = sums[1:] + (added,)  # noqa: RUF005  as the compiler has it
    return sums


@triton.jit
def _by_row(squares: tl.tensor, rows: tl.constexpr, warps: tl.constexpr) -> tl.tensor:
    """Sums over all inputs, [rows]."""
    of_places = tl.reshape(tl.sum(squares, 1), [rows // 8, warps, 8])
    return tl.reshape(tl.sum(of_places, 1), [rows])


@triton.jit
def _for_warps(of_rows: tl.tensor, rows: tl.constexpr, warps: tl.constexpr) -> tl.tensor:
    """Numbers of rows for each place of a tile, [rows * warps, 1]."""
    of_rows = tl.broadcast_to(tl.reshape(of_rows, [rows // 8, 1, 8]), [rows // 8, warps, 8])
    return tl.reshape(of_rows, [rows * warps])[:, None]


@triton.jit
def _scaled(values: tl.tuple, scales: tl.tuple, squares: tl.tensor) -> tuple[tl.tuple, tl.tensor]:
    """The rows times the norm's weight, and the sum of their squares."""
    scaled = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(len(values)):
        wide = values[chunk].to(tl.float32)
        squares += wide * wide
        scaled += ((wide * scales[chunk].to(tl.float32)).to(values[chunk].dtype),)
    return scaled, squares


@triton.jit
def _joined(
    values: tl.tuple,
    delta_at: tl.tensor,
    delta_weight: tl.tensor,
    stream_at: tl.tensor,
    factor: tl.tensor,
    own: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.tensor,
    chunks: tl.constexpr,
    width: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The rows and their normed delta, added up in the form in which the first program stores them."""
    added = _load_rows(delta_at, k, start, in_features, chunks, width, even_in)
    scales = _load_rows(delta_weight + k, k, start, in_features, chunks, width, even_in)
    joined = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(chunks):
        wide = added[chunk].to(tl.float32) * factor * scales[chunk].to(tl.float32)
        total = (values[chunk].to(tl.float32) + wide).to(values[chunk].dtype)
        mask = own & (start + chunk * width + k < in_features) & (tl.program_id(0) == 0)
        tl.store(stream_at + start + chunk * width, total, mask=mask)
        joined += (total,)
    return joined


@triton.jit
def _load_weights(
    at: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.tensor,
    chunks: tl.constexpr,
    width: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    # Read only once: leave the cache to data that is read again.
    loaded = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(chunks):
        begin = start + chunk * width
        if even_out and even_in:
            loaded += (tl.load(at + begin, eviction_policy="evict_first"),)
        else:
            mask = inside & (begin + k < in_features)
            loaded += (tl.load(at + begin, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return loaded


@triton.jit
def _load_rows(
    at: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_features: tl.tensor,
    chunks: tl.constexpr,
    width: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    loaded = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(chunks):
        begin = start + chunk * width
        if even_in:
            loaded += (tl.load(at + begin),)
        else:
            loaded += (tl.load(at + begin, mask=begin + k < in_features, other=0.0),)
    return loaded


@triton.jit
def _load_scales(
    norm_weight: tl.tensor,
    start: tl.tensor,
    in_features: tl.tensor,
    rows: tl.constexpr,
    warps: tl.constexpr,
    chunks: tl.constexpr,
    width: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The norm's weight for each place of a tile, loaded for 8 rows and repeated for the others."""
    _, k = _places(8, warps, chunks, width)
    loaded = ()  # type: tuple[tl.tensor, ...]
    of_eight = _load_rows(norm_weight + k, k, start, in_features, chunks, width, even_in)
    for chunk in tl.static_range(chunks):
        one = tl.reshape(of_eight[chunk], [1, 8 * warps, width])
        loaded += (tl.reshape(tl.broadcast_to(one, [rows // 8, 8 * warps, width]), [rows * warps, width]),)
    return loaded

"""GEMV with packed weights of 4 or 8 bits, for one row, with fused prologue and epilogue: see `vector_linear`.

Each thread handles four words of a row, 16 bytes, at a time, and multiplies the codes in them with the inputs directly:

    Σ x · weight  =  scale · (Σ x · code  -  zero · Σ x)              the last sum is the same for all outputs

A weight costs one mask, one multiply-add and an eighth of a shift: see `packed_words`. That takes as long as reading
it, so a program goes through several tiles of outputs, and loads the words of the next while it multiplies:

    load    │ a │ b │   │ c │   │ d │            a and b before the wait for the previous kernel
    compute │       │ a │   │ b │   │ c │ …

Knows shapes; knows no layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue, finish, previous
from ostro.kernels.gpu.packed_layout import quad_inputs
from ostro.kernels.gpu.packed_words import Packed, coded, halves, lifted
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Prologue
from ostro.kernels.gpu.tilings import VectorTiling, power_of_two

# Rows per step: the words of one or two steps, the inputs and the sums fill a thread's registers.
_MOST_ROWS, _MOST_ROWS_IN_TURNS = 8, 4
_MOST_WARPS = 4
# Programs of four warps that fit on a multiprocessor if a thread uses at most _REGISTERS registers; of smaller
# programs, _ENOUGH per multiprocessor suffice.
_PLACES, _REGISTERS, _ENOUGH = 4, 128, 8


@dataclass(frozen=True, slots=True)
class PackedVectorTiling(VectorTiling):
    turns: int = 1
    """Tiles of outputs that a program goes through."""


def default_tiling(
    out_features: int, in_features: int, *, bits: int, gated: bool, multiprocessors: int = 132
) -> PackedVectorTiling:
    """`out_features` counts the weight's rows, both gate and up."""
    a_warp, copies = 32 * quad_inputs(bits), 2 if gated else 1
    # As many warps as leave none idle in a row's last chunk, or else few.
    warps = min((4, 2, 1), key=lambda number: triton.cdiv(in_features, number * a_warp) * number)
    ins, total = min(warps * a_warp, power_of_two(in_features)), out_features // copies
    places = _PLACES * _MOST_WARPS // warps * multiprocessors
    outs = _MOST_ROWS // copies
    if in_features > ins or triton.cdiv(total, outs) > places:
        outs = _MOST_ROWS_IN_TURNS // copies
    while outs > 1 and 2 * triton.cdiv(total, outs) <= min(places, _ENOUGH * multiprocessors):
        outs //= 2
    return PackedVectorTiling(outs, ins, warps, turns=triton.cdiv(triton.cdiv(total, outs), places))


def packed_vector(
    x: Tensor,
    weight: Packed,
    out: Tensor,
    tiling: PackedVectorTiling,
    prologue: Prologue = NO_PROLOGUE,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    pdl: bool = False,
) -> None:
    """Writes out [1, outs], or adds to it."""
    assert prologue.delta is None
    out_features, in_features = weight.shape
    outs = out_features // epilogue.copies
    a_quad = quad_inputs(weight.bits)
    quads = in_features // a_quad
    block_quads = max(1, tiling.ins // a_quad)
    norm_weight, eps = prologue.norm_arguments(x)
    _vector_kernel[(triton.cdiv(triton.cdiv(outs, tiling.outs), tiling.turns),)](
        _pairs_of(x),
        weight.words,
        weight.pairs,
        epilogue.bias_or(weight.pairs),
        _pairs_of(norm_weight),
        out,
        eps,
        outs,
        quads,
        weight.pairs.shape[1],
        quads_a_group=weight.group // a_quad,
        quads_a_block=weight.block // a_quad,
        bits=weight.bits,
        has_minimum=weight.has_minimum,
        block_out=tiling.outs,
        block_quads=block_quads,
        chunks=triton.cdiv(quads, block_quads),
        even_out=outs % tiling.outs == 0,
        even_in=quads % block_quads == 0,
        loops=tiling.turns > 1 or quads > block_quads,
        has_norm=prologue.norm is not None,
        **epilogue.flags,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        maxnreg=_REGISTERS,
        launch_pdl=pdl,
    )


def _pairs_of(row: Tensor) -> Tensor:
    """Two bfloat16 values per word: one load instead of two."""
    return row.view(torch.int32) if row.dtype == torch.bfloat16 else row


@triton.jit
def _vector_kernel(
    x: tl.tensor,
    words: tl.tensor,
    pairs: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    outs: tl.tensor,
    quads: tl.tensor,
    groups: tl.tensor,
    quads_a_group: tl.constexpr,
    quads_a_block: tl.constexpr,
    bits: tl.constexpr,
    has_minimum: tl.constexpr,
    block_out: tl.constexpr,
    block_quads: tl.constexpr,
    chunks: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    loops: tl.constexpr,
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
    # With gate and up, rows of the weight come first from the gate, then from the up half.
    rows: tl.constexpr = block_out * (2 if gated else 1)
    quad, n = tl.arange(0, block_quads), tl.arange(0, block_out)
    # A step is a chunk of a tile. A program's tiles are one grid size apart.
    steps = (tl.cdiv(outs, block_out) - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0) * chunks
    words_held, pairs_held = _weights(
        words, pairs, quad, 0, steps, outs, quads, groups, quads_a_group, rows, block_out, chunks, even_out, even_in
    )
    if loops:
        words_next, pairs_next = _weights(
            words, pairs, quad, 1, steps, outs, quads, groups, quads_a_group, rows, block_out, chunks, even_out, even_in
        )
    if pdl:
        gdc_wait()

    squares = tl.zeros([block_quads], tl.float32)
    sums = _zeros(squares, rows)
    if chunks == 1:
        inputs, total, squares = _inputs(x, norm_weight, quad, quads, squares, quads_a_block, bits, has_norm, even_in)
    for step in tl.range(0, steps, loop_unroll_factor=2):
        if chunks > 1:
            inputs, total, squares = _inputs(
                x,
                norm_weight,
                quad + step % chunks * block_quads,
                quads,
                squares,
                quads_a_block,
                bits,
                has_norm,
                even_in,
            )
        sums = _add_products(sums, words_held, pairs_held, inputs, total, bits, has_minimum)
        if loops:
            words_held, pairs_held = words_next, pairs_next
            words_next, pairs_next = _weights(
                words,
                pairs,
                quad,
                step + 2,
                steps,
                outs,
                quads,
                groups,
                quads_a_group,
                rows,
                block_out,
                chunks,
                even_out,
                even_in,
            )
        if step % chunks == chunks - 1:
            here = _tile(step, chunks) * block_out + n
            before = previous(out + here, here < outs, adds)
            y = _added_up(sums) * 2.0**49
            if has_norm:
                # The norm's factor is the same for the whole row, so it can be applied last.
                y *= tl.rsqrt(tl.sum(squares, 0) / (quads * (128 // bits)) + eps)
            y_up = y
            if gated:
                y, y_up = tl.split(y.reshape(2, block_out).trans(1, 0))
            finish(
                y,
                y_up,
                before,
                bias,
                bias,
                out,
                here,
                here < outs,
                outs,
                False,
                has_bias,
                adds,
                activation,
                gated,
                multiplier,
            )
            sums = _zeros(squares, rows)
            if chunks > 1:
                squares = tl.zeros_like(squares)


@triton.jit
def _tile(step: tl.tensor, chunks: tl.constexpr) -> tl.tensor:
    return tl.program_id(0) + step // chunks * tl.num_programs(0)


@triton.jit
def _zeros(like: tl.tensor, number: tl.constexpr) -> tl.tuple:
    found = ()  # type: tuple[tl.tensor, ...]
    for _ in tl.static_range(number):
        found += (tl.zeros_like(like),)
    return found


@triton.jit
def _added_up(sums: tl.tuple) -> tl.tensor:
    """The total of each sum, reduced together so that threads synchronise only once."""
    stack = sums
    # Halves are joined first: the last dimension is the lowest bit of the number, which is at most 16.
    for _level in tl.static_range(4):
        if len(stack) > 1:
            joined = ()  # type: tuple[tl.tensor, ...]
            for each in tl.static_range(len(stack) // 2):
                joined += (tl.join(stack[each], stack[each + len(stack) // 2]),)
            stack = joined
    return tl.sum(stack[0].reshape(sums[0].shape[0], len(sums)), 0)


@triton.jit
def _weights(
    words: tl.tensor,
    pairs: tl.tensor,
    quad: tl.tensor,
    step: tl.tensor,
    steps: tl.tensor,
    outs: tl.tensor,
    quads: tl.tensor,
    groups: tl.tensor,
    quads_a_group: tl.constexpr,
    rows: tl.constexpr,
    block_out: tl.constexpr,
    chunks: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:
    """For each row, four words [quads, 4], which stay packed until they are multiplied, so that nothing waits for the
    loads; and the pairs [quads] of their groups. Zeros where there are no weights.
    """
    first = _tile(step, chunks) * block_out
    at = quad + step % chunks * quad.shape[0]
    words_at = words + first.to(tl.int64) * (quads * 4) + (at[:, None] * 4 + tl.arange(0, 4)[None, :])
    pairs_at = pairs + first.to(tl.int64) * groups + at // quads_a_group
    found = ()  # type: tuple[tl.tensor, ...]
    theirs = ()  # type: tuple[tl.tensor, ...]
    for row in tl.static_range(rows):
        there = (at < quads) & (step < steps) if not even_in else tl.broadcast_to(step < steps, at.shape)
        if not even_out:
            there &= first + row % block_out < outs
        # With gate and up, rows of the weight come first from the gate, then from the up half.
        own = (row % block_out + row // block_out * outs).to(tl.int64)
        # Read only once: leave the cache to data that is read again.
        found += (tl.load(words_at + own * (quads * 4), mask=there[:, None], other=0, eviction_policy="evict_first"),)
        theirs += (tl.load(pairs_at + own * groups, mask=there, other=0),)
    return found, theirs


@triton.jit
def _columns(loaded: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four columns of [quads, 4]."""
    even, odd = tl.split(loaded.reshape(loaded.shape[0], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _inputs(
    x: tl.tensor,
    norm_weight: tl.tensor,
    quad: tl.tensor,
    quads: tl.tensor,
    squares: tl.tensor,
    quads_a_block: tl.constexpr,
    bits: tl.constexpr,
    has_norm: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:
    """For each code number, the inputs for both halves of four words, scaled up to meet codes that are denormal
    numbers; the sum of all inputs, times 2 ** -49; and the sum of squares so far.
    """
    numbers: tl.constexpr = 16 // bits
    found = ()  # type: tuple[tl.tuple, ...]
    total = tl.zeros_like(squares)
    first = quad // quads_a_block * (quads_a_block * numbers) + quad % quads_a_block
    for number in tl.static_range(numbers):
        lower, upper = 2.0 ** (100 - lifted(number, 0, bits)), 2.0 ** (100 - lifted(number, 1, bits))
        at = first + number * quads_a_block
        a, b, c, d, e, f, g, h = _eight(x, at, quad < quads, even_in)
        if has_norm:
            squares += (a * a + b * b + c * c + d * d) + (e * e + f * f + g * g + h * h)
            by = _eight(norm_weight, at, quad < quads, even_in)
            a *= by[0]
            b *= by[1]
            c *= by[2]
            d *= by[3]
            e *= by[4]
            f *= by[5]
            g *= by[6]
            h *= by[7]
        total += ((a + b) + (c + d)) + ((e + f) + (g + h))
        found += ((a * lower, c * lower, e * lower, g * lower), (b * upper, d * upper, f * upper, h * upper))
    # Codes are denormal numbers, their value times 2 ** -149, and inputs are scaled by 2 ** 100.
    return found, total * 2.0**-49, squares


@triton.jit
def _eight(at: tl.tensor, k: tl.tensor, inside: tl.tensor, even_in: tl.constexpr) -> tl.tuple:
    """Elements 8 k to 8 k + 7, in float32. bfloat16 values, two per word, are the upper halves of float32."""
    found = ()  # type: tuple[tl.tensor, ...]
    if at.dtype.element_ty == tl.int32:
        own = at + (k[:, None] * 4 + tl.arange(0, 4)[None, :])
        words = _columns(tl.load(own) if even_in else tl.load(own, mask=inside[:, None], other=0))
        for word in tl.static_range(4):
            lower, upper = words[word] << 16, words[word] & -65536
            found += (lower.to(tl.float32, bitcast=True), upper.to(tl.float32, bitcast=True))
    else:
        for number in tl.static_range(8):
            found += (tl.load(at + 8 * k + number, mask=inside, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _add_products(
    so_far: tl.tuple,
    four: tl.tuple,
    pairs: tl.tuple,
    inputs: tl.tuple,
    total: tl.tensor,
    bits: tl.constexpr,
    has_minimum: tl.constexpr,
) -> tl.tuple:
    """Adds to each row's sum the products of the weights in four words with their inputs, times 2 ** -49."""
    sums = ()  # type: tuple[tl.tensor, ...]
    for row in tl.static_range(len(so_far)):
        words = _columns(four[row])
        # Two sums, so that not every addition waits for the one before.
        lower = tl.zeros_like(total)
        upper = tl.zeros_like(total)
        for number in tl.static_range(16 // bits):
            for word in tl.static_range(4):
                lower += coded(words[word], number, 0, bits) * inputs[2 * number][word]
                upper += coded(words[word], number, 1, bits) * inputs[2 * number + 1][word]
        scale, second = halves(pairs[row])
        own = so_far[row]
        if has_minimum:
            own += scale * (lower + upper)
            own += second * total
        else:
            own += scale * (lower + upper - second * total)
        sums += (own,)
    return sums

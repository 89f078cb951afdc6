"""GEMV with packed weights of 4 or 8 bits, for one row, with fused prologue and epilogue: see `vector_linear`.

Each thread has four words of a row, 16 bytes, at a time, and multiplies what they hold with the inputs as they are:

    Σ x · weight  =  scale · (Σ x · code  -  zero · Σ x)              the last sum is the same for all outputs

A weight costs one mask, one multiply-add and an eighth of a shift: see `packed_words`.

Knows shapes; knows no layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.epilogue import finish, previous
from ostro.kernels.gpu.packed_layout import quad_inputs
from ostro.kernels.gpu.packed_words import Packed, coded, halves, lifted
from ostro.kernels.gpu.tilings import VectorTiling, power_of_two

_WORDS_A_THREAD = 4
# Words per thread that are loaded before the wait for the previous kernel: all, so that there is no loop.
_HELD_WORDS = 64
_MOST_WARPS = 4
# Programs of four warps that a multiprocessor has room for, if a thread has no more registers than these.
_PLACES, _REGISTERS = 4, 128


def default_tiling(
    out_features: int, in_features: int, *, bits: int, gated: bool, multiprocessors: int = 132
) -> VectorTiling:
    """`out_features` counts the weight's rows, both gate and up."""
    a_warp = 32 * quad_inputs(bits)
    warps = max(1, min(_MOST_WARPS, power_of_two(in_features) // a_warp))
    chunks, copies = -(-in_features // (warps * a_warp)), 2 if gated else 1
    outs = max(1, _HELD_WORDS // _WORDS_A_THREAD // chunks // copies)
    outs = 1 << (outs.bit_length() - 1)
    # All programs at once, in the places that there are: larger ones would leave some empty.
    while outs > 1 and 2 * out_features // copies // outs <= _PLACES * multiprocessors:
        outs //= 2
    return VectorTiling(outs=outs, ins=min(warps * a_warp, power_of_two(in_features)), warps=warps)


def packed_vector(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out: Tensor,
    tiling: VectorTiling,
    *,
    norm: tuple[Tensor, float] | None = None,
    adds: bool = False,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> None:
    """Writes out [1, outs], or adds to it."""
    out_features, in_features = weight.shape
    outs = out_features // (2 if gated else 1)
    a_quad = quad_inputs(weight.bits)
    quads = in_features // a_quad
    block_quads = max(1, tiling.ins // a_quad)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    _vector_kernel[(triton.cdiv(outs, tiling.outs),)](
        _pairs_of(x),
        weight.words,
        weight.pairs,
        weight.pairs if bias is None else bias,
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
        has_norm=norm is not None,
        has_bias=bias is not None,
        adds=adds,
        activation=activation or "",
        gated=gated,
        multiplier=multiplier,
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
    num_rows: tl.constexpr = block_out * (2 if gated else 1)
    first = tl.program_id(0) * block_out
    quad = tl.arange(0, block_quads)

    # Words stay packed until they are multiplied: unpacking would have to wait for the loads, and would come before the
    # wait for the previous kernel.
    words_held = ()  # type: tuple[tl.tuple, ...]
    pairs_held = ()  # type: tuple[tl.tuple, ...]
    main_words = words + first.to(tl.int64) * quads * 4
    main_pairs = pairs + first.to(tl.int64) * groups
    for chunk in tl.static_range(chunks):
        own_quad = quad + chunk * block_quads
        for row in tl.static_range(num_rows):
            # With gate and up, rows of the weight come first from the one, then from the other.
            own_words, own_pairs = main_words, main_pairs
            if row >= block_out:
                own_words += outs.to(tl.int64) * quads * 4
                own_pairs += outs.to(tl.int64) * groups
            own_words += row % block_out * quads * 4
            own_pairs += row % block_out * groups
            inside = first + row % block_out < outs
            words_held += (_words(own_words, own_quad, inside, quads, even_out, even_in),)
            pairs_held += (_pairs(own_pairs, own_quad, inside, quads, quads_a_group, even_out, even_in),)
    if pdl:
        gdc_wait()

    n = first + tl.arange(0, block_out)
    before = previous(out + n, n < outs, adds)
    sums = ()  # type: tuple[tl.tensor, ...]
    for _row_number in tl.static_range(num_rows):
        sums += (tl.zeros([block_quads], tl.float32),)
    squares = tl.zeros([block_quads], tl.float32)
    for chunk in tl.static_range(chunks):
        inputs, total, squares = _inputs(
            x, norm_weight, quad + chunk * block_quads, quads, squares, quads_a_block, bits, has_norm, even_in
        )
        so_far = sums
        sums = ()
        for row in tl.static_range(num_rows):
            own, by = words_held[chunk * num_rows + row], pairs_held[chunk * num_rows + row]
            sums += (_add_products(so_far[row], own, by, inputs, total, bits, has_minimum),)
    y = _added_up(sums, 0, block_out) * 2.0**49
    y_up = y
    if gated:
        y_up = _added_up(sums, block_out, block_out) * 2.0**49
    if has_norm:
        # The norm's factor is the same for the whole row, so it can be applied last.
        factor = tl.rsqrt(tl.sum(squares, 0) / (quads * (128 // bits)) + eps)
        y *= factor
        y_up *= factor
    finish(y, y_up, before, bias, bias, out, n, n < outs, outs, False, has_bias, adds, activation, gated, multiplier)


@triton.jit
def _added_up(sums: tl.tuple, start: tl.constexpr, number: tl.constexpr) -> tl.tensor:
    """[number], each the total of one of the sums: together, so that threads meet only once."""
    stack = ()  # type: tuple[tl.tensor, ...]
    for each in tl.static_range(number):
        stack += (sums[start + each],)
    # Halves are joined first: the last dimension is the lowest bit of the number, which is at most 16.
    for _level in tl.static_range(4):
        if len(stack) > 1:
            joined = ()  # type: tuple[tl.tensor, ...]
            for each in tl.static_range(len(stack) // 2):
                joined += (tl.join(stack[each], stack[each + len(stack) // 2]),)
            stack = joined
    return tl.sum(stack[0].reshape(sums[0].shape[0], number), 0)


@triton.jit
def _words(
    words: tl.tensor,
    quad: tl.tensor,
    inside: tl.tensor,
    quads: tl.tensor,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    at = words + (quad[:, None] * 4 + tl.arange(0, 4)[None, :])
    # Read only once: leave the cache to data that is read again.
    if even_out and even_in:
        return _columns(tl.load(at, eviction_policy="evict_first"))
    return _columns(tl.load(at, mask=inside & (quad < quads)[:, None], other=0, eviction_policy="evict_first"))


@triton.jit
def _columns(loaded: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of [quads, 4]."""
    even, odd = tl.split(loaded.reshape(loaded.shape[0], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _pairs(
    pairs: tl.tensor,
    quad: tl.tensor,
    inside: tl.tensor,
    quads: tl.tensor,
    quads_a_group: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    """Of each quad's group; zeros beyond the end."""
    at = pairs + quad // quads_a_group
    return tl.load(at) if even_out and even_in else tl.load(at, mask=inside & (quad < quads), other=0)


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
    """For each number of a code the inputs of four words, in both halves of each, raised to meet codes that are
    denormal numbers; the sum of all, 2 ** -49 times; and the sum of squares so far.
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
    # Codes are denormal numbers, 2 ** -149 times what they mean, and inputs are raised by 2 ** 100.
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
    so_far: tl.tensor,
    words: tl.tuple,
    pairs: tl.tensor,
    inputs: tl.tuple,
    total: tl.tensor,
    bits: tl.constexpr,
    has_minimum: tl.constexpr,
) -> tl.tensor:
    """Adds the products of the weights in four words with their inputs, 2 ** -49 times."""
    # Two sums, so that not every addition waits for the one before.
    lower = tl.zeros_like(total)
    upper = tl.zeros_like(total)
    for number in tl.static_range(16 // bits):
        for word in tl.static_range(4):
            lower += coded(words[word], number, 0, bits) * inputs[2 * number][word]
            upper += coded(words[word], number, 1, bits) * inputs[2 * number + 1][word]
    scale, second = halves(pairs)
    result = lower + upper
    if has_minimum:
        so_far += scale * result
        so_far += second * total
    else:
        result -= second * total
        so_far += scale * result
    return so_far

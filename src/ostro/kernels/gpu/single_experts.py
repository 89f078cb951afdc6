"""A mixture of experts for a single row: GEMVs that read the router's logits and choose their matrices themselves.

    x ──(norm)──> · up of each chosen expert ── act(gate) * up ──> inner [chosen, inner]
    inner ──────> · down of each, times its weight, added up ────> out, or added to the residual

Every program chooses the experts for itself: a kernel that did so once would cost more, since the others would have to
wait for it. Each program must load the logits only once: thousands of requests for the same bytes queue up. The second
kernel chooses before the first has ended, and loads its weights, because the first lets it start only once the logits
are complete (see `experts`).

Multiplies and adds in float32 like `vector_linear`, whose loads it shares. The plain twin is `torch_models.experts`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.epilogue import previous
from ostro.kernels.gpu.experts import Ending, Matrices
from ostro.kernels.gpu.mlp import GATES, gate_up
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.routing import choose, expert_of, load_keys, without
from ostro.kernels.gpu.tilings import VectorTiling, default_vector_tiling, power_of_two
from ostro.kernels.gpu.vector_linear import add_products, load_inputs, load_weights, numbers, pairs, word_unit

_NARROW = 3072
INNER, OUTER = VectorTiling(4, 256, 4), VectorTiling(4, 256, 4)
"""Tilings for narrow rows, where each warp has rows of its own."""
# Registers for weights in flight, per thread.
_HELD = 64
_HELD_AHEAD = 96


def single_inner(
    x: Tensor,
    logits: Tensor,
    up: Matrices,
    chosen: int,
    activation: str,
    *,
    norm: NormWeights | None = None,
    pdl: bool = False,
) -> Tensor:
    """x [1, in], normed first by an RMS norm if there is one; logits [1, experts or more]; up
    [experts, 2 * inner, in], gate above up -> [chosen, inner], by falling logit.
    """
    assert len(x) == 1
    assert activation in GATES, activation
    weight, bias = up
    experts, rows, in_features = weight.shape
    out = torch.empty(chosen, rows // 2, dtype=x.dtype, device=x.device)
    tiling = _tiling(rows, in_features, gated=True)
    norm_weight, eps, _ = norm or (x, 0.0, None)
    paired = _is_paired(x, weight)
    if paired:
        x, weight, norm_weight = pairs(x), pairs(weight), pairs(norm_weight)
    words = weight.shape[2]
    block, chunks, held = _chunks(tiling, weight, in_features, copies=2)
    tiles = triton.cdiv(out.shape[1], tiling.outs)
    _inner_kernel[(chosen * tiles,)](
        x,
        logits,
        weight,
        logits if bias is None else bias,
        norm_weight,
        out,
        eps,
        out.shape[1],
        tiles,
        words // word_unit(words),
        in_features,
        unit=word_unit(words),
        paired=paired,
        count=experts,
        block_experts=power_of_two(experts),
        block_out=tiling.outs,
        block_words=block,
        held=held,
        loops=held < chunks,
        warp_a_row=_has_warp_a_row(tiling, block, weight),
        even_out=out.shape[1] % tiling.outs == 0,
        even_in=words % (held * block) == 0,
        has_norm=norm is not None,
        has_bias=bias is not None,
        activation=activation,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        launch_pdl=pdl,
    )
    return out


def single_outer(
    inner: Tensor,
    logits: Tensor,
    down: Matrices,
    *,
    normalized: bool,
    ending: Ending,
    pdl: bool = False,
) -> Tensor:
    """inner [chosen, inner] as `single_inner` returns it, the same logits, down [experts, out, inner] -> [1, out],
    or the residual. Must be launched right after `single_inner`.
    """
    shared, residual, multiplier = ending
    assert residual is not None or multiplier == 1.0
    weight, bias = down
    experts, outs, in_features = weight.shape
    out = torch.empty(1, outs, dtype=inner.dtype, device=inner.device) if residual is None else residual
    tiling = _tiling(outs, in_features, gated=False)
    chosen, paired = len(inner), _is_paired(inner, weight)
    if paired:
        inner, weight = pairs(inner), pairs(weight)
    words = weight.shape[2]
    block, chunks, held = _chunks(tiling, weight, in_features, copies=1)
    # All weights before the wait, if there are registers for them.
    ahead = chosen * chunks * tiling.outs * block * weight.element_size() <= _HELD_AHEAD * 4 * 32 * tiling.warps
    gate = None if shared is None else shared.gate
    _outer_kernel[(triton.cdiv(outs, tiling.outs),)](
        inner,
        logits,
        weight,
        logits if bias is None else bias,
        inner if shared is None else shared.rows,
        logits if gate is None else gate,
        out,
        outs,
        words // word_unit(words),
        unit=word_unit(words),
        paired=paired,
        count=experts,
        chosen=chosen,
        normalized=normalized,
        block_experts=power_of_two(experts),
        block_out=tiling.outs,
        block_words=block,
        chunks=chunks,
        held=held,
        ahead=ahead,
        warp_a_row=_has_warp_a_row(tiling, block, weight),
        even_out=outs % tiling.outs == 0,
        even_in=words % (block if ahead else held * block) == 0,
        has_bias=bias is not None,
        has_shared=shared is not None,
        has_gate=gate is not None,
        adds=residual is not None,
        multiplier=multiplier,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=1,
        # With more registers, not all programs would run at once.
        maxnreg=128,
        launch_pdl=pdl,
    )
    return out


def _tiling(out_features: int, in_features: int, *, gated: bool) -> VectorTiling:
    if in_features <= _NARROW:
        narrow = INNER if gated else OUTER
        return replace(narrow, ins=min(narrow.ins, power_of_two(in_features)))
    return default_vector_tiling(out_features, in_features, gated=gated)


def _is_paired(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == torch.bfloat16 and weight.shape[2] % 2 == 0


def _chunks(tiling: VectorTiling, weight: Tensor, in_features: int, *, copies: int) -> tuple[int, int, int]:
    """Words read at a time, how many such reads a row takes, and how many of them are in flight at once."""
    words = weight.shape[2]
    block = max(1, tiling.ins * words // in_features)
    chunks = triton.cdiv(words, block)
    bytes_a_chunk = tiling.outs * block * weight.element_size() * copies
    return block, chunks, min(chunks, max(1, _HELD * 4 * 32 * tiling.warps // bytes_a_chunk))


def _has_warp_a_row(tiling: VectorTiling, block: int, weight: Tensor) -> bool:
    return tiling.outs >= tiling.warps and block * weight.element_size() <= 512


@triton.jit(do_not_specialize=["tiles", "in_units"])
def _inner_kernel(
    x: tl.tensor,
    logits: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    outs: tl.tensor,
    tiles: tl.tensor,
    in_units: tl.tensor,
    in_features: tl.tensor,
    unit: tl.constexpr,
    paired: tl.constexpr,
    count: tl.constexpr,
    block_experts: tl.constexpr,
    block_out: tl.constexpr,
    block_words: tl.constexpr,
    held: tl.constexpr,
    loops: tl.constexpr,
    warp_a_row: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    activation: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    in_words = in_units * unit
    slot = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * block_out + tl.arange(0, block_out)
    k = tl.arange(0, block_words)
    inside = n < outs
    copies: tl.constexpr = block_out if warp_a_row else 1
    if pdl:
        gdc_wait()
        # Not before: the next kernel relies on the logits.
        gdc_launch_dependents()
    keys = load_keys(logits, count, block_experts, copies)
    best = tl.max(keys, 1)
    for _ in range(slot):
        keys = without(keys, best)
        best = tl.max(keys, 1)
    expert = expert_of(best)
    main_at = weight + (expert * 2 * outs + n).to(tl.int64)[:, None] * in_words + k[None, :]
    up_at = main_at + outs.to(tl.int64) * in_words
    main = tl.zeros([block_out, block_words], tl.float32)
    up = tl.zeros([block_out, block_words], tl.float32)
    squares = tl.zeros([copies, block_words], tl.float32)
    if loops:
        for start in range(0, in_words, held * block_words):
            main, up, squares = _add_gated(
                main,
                up,
                squares,
                x,
                norm_weight,
                main_at,
                up_at,
                inside,
                k,
                start,
                in_words,
                held,
                block_words,
                copies,
                even_out,
                even_in,
                has_norm,
                paired,
            )
    else:
        main, up, squares = _add_gated(
            main,
            up,
            squares,
            x,
            norm_weight,
            main_at,
            up_at,
            inside,
            k,
            0,
            in_words,
            held,
            block_words,
            copies,
            even_out,
            even_in,
            has_norm,
            paired,
        )
    y, y_up = tl.sum(main, 1), tl.sum(up, 1)
    if has_norm:
        factor = tl.rsqrt(tl.sum(squares, 1) / in_features + eps)
        y *= factor
        y_up *= factor
    if has_bias:
        own_bias = bias + expert * 2 * outs + n
        y += tl.load(own_bias, mask=inside, other=0.0).to(tl.float32)
        y_up += tl.load(own_bias + outs, mask=inside, other=0.0).to(tl.float32)
    y = gate_up(y, y_up, activation)
    tl.store(out + slot * outs + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_gated(
    main: tl.tensor,
    up: tl.tensor,
    squares: tl.tensor,
    x: tl.tensor,
    norm_weight: tl.tensor,
    main_at: tl.tensor,
    up_at: tl.tensor,
    inside: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    in_words: tl.tensor,
    held: tl.constexpr,
    block_words: tl.constexpr,
    copies: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    has_norm: tl.constexpr,
    paired: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds up `held` chunks of inputs from `start` on; all their weights are in flight before the first is used."""
    main_held = ()  # type: tuple[tl.tensor, ...]
    up_held = ()  # type: tuple[tl.tensor, ...]
    for chunk in tl.static_range(held):
        at = start + chunk * block_words
        main_held += (load_weights(main_at, inside, k, at, in_words, even_out, even_in),)
        up_held += (load_weights(up_at, inside, k, at, in_words, even_out, even_in),)
    # Otherwise the compiler would delay some loads until others have been used.
    tl.debug_barrier()
    for chunk in tl.static_range(held):
        at = start + chunk * block_words
        even, odd = numbers(load_inputs(x, k, at, in_words, copies, even_in), paired)
        if has_norm:
            squares = add_products(squares, even, odd, even, odd, paired)
            even_scale, odd_scale = numbers(load_inputs(norm_weight, k, at, in_words, copies, even_in), paired)
            even *= even_scale
            odd *= odd_scale
        even_weight, odd_weight = numbers(main_held[chunk], paired)
        main = add_products(main, even_weight, odd_weight, even, odd, paired)
        even_weight, odd_weight = numbers(up_held[chunk], paired)
        up = add_products(up, even_weight, odd_weight, even, odd, paired)
    return main, up, squares


@triton.jit(do_not_specialize=["in_units"])
def _outer_kernel(
    inner: tl.tensor,
    logits: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    shared: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    outs: tl.tensor,
    in_units: tl.tensor,
    unit: tl.constexpr,
    paired: tl.constexpr,
    count: tl.constexpr,
    chosen: tl.constexpr,
    normalized: tl.constexpr,
    block_experts: tl.constexpr,
    block_out: tl.constexpr,
    block_words: tl.constexpr,
    chunks: tl.constexpr,
    held: tl.constexpr,
    ahead: tl.constexpr,
    warp_a_row: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    has_bias: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
    adds: tl.constexpr,
    multiplier: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
    in_words = in_units * unit
    n = tl.program_id(0) * block_out + tl.arange(0, block_out)
    k = tl.arange(0, block_words)
    inside = n < outs
    copies: tl.constexpr = block_out if warp_a_row else 1
    experts, shares = choose(logits, count, chosen, normalized, block_experts, copies)
    at = weight + n.to(tl.int64)[:, None] * in_words + k[None, :]
    matrix = outs.to(tl.int64) * in_words
    main = tl.zeros([block_out, block_words], tl.float32)
    if ahead:
        weights_held = ()  # type: tuple[tl.tensor, ...]
        for slot in tl.static_range(chosen):
            matrix_at = at + experts[slot][:, None] * matrix
            for chunk in tl.static_range(chunks):
                weights_held += (load_weights(matrix_at, inside, k, chunk * block_words, in_words, even_out, even_in),)
    if pdl:
        gdc_wait()
    before = previous(out + n, inside, adds)
    if has_shared:
        beside = tl.load(shared + n, mask=inside, other=0.0).to(tl.float32)
        if has_gate:
            beside *= tl.sigmoid(tl.load(gate).to(tl.float32))
    if ahead:
        for slot in tl.static_range(chosen):
            own = tl.zeros([block_out, block_words], tl.float32)
            for chunk in tl.static_range(chunks):
                row = inner + slot * in_words
                even, odd = numbers(load_inputs(row, k, chunk * block_words, in_words, copies, even_in), paired)
                even_weight, odd_weight = numbers(weights_held[slot * chunks + chunk], paired)
                own = add_products(own, even_weight, odd_weight, even, odd, paired)
            main += own * shares[slot][:, None]
    else:
        for slot in tl.static_range(chosen):
            matrix_at = at + experts[slot][:, None] * matrix
            row = inner + slot * in_words
            own = tl.zeros([block_out, block_words], tl.float32)
            for start in range(0, in_words, held * block_words):
                loaded = ()  # type: tuple[tl.tensor, ...]
                for chunk in tl.static_range(held):
                    here = start + chunk * block_words
                    loaded += (load_weights(matrix_at, inside, k, here, in_words, even_out, even_in),)
                for chunk in tl.static_range(held):
                    here = start + chunk * block_words
                    even, odd = numbers(load_inputs(row, k, here, in_words, copies, even_in), paired)
                    even_weight, odd_weight = numbers(loaded[chunk], paired)
                    own = add_products(own, even_weight, odd_weight, even, odd, paired)
            main += own * shares[slot][:, None]
    total = tl.sum(main, 1)
    if has_bias:
        for slot in tl.static_range(chosen):
            of_slot = tl.load(bias + experts[slot] * outs + n, mask=inside, other=0.0).to(tl.float32)
            total += shares[slot] * of_slot
    if has_shared:
        total += beside
    if adds:
        total = before + total * multiplier
    tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)

"""Small-batch matmul with packed weights of 4 or 8 bits on tensor cores: see `dot_linear`.

The words come through shared memory into the very registers from which the tensor cores take their first operand, and
become 16-bit integers there: `packed_words` orders codes so that nothing moves between threads. The operands are exact;
scales multiply the sums, once for each block of inputs.

Knows shapes; knows no layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ostro.kernels.gpu.dot_linear import MOST_TILES, arrival_counters, conclude
from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue, previous
from ostro.kernels.gpu.packed_words import Packed, halves, integers
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling, block_rows

_SHARED_MEMORY = 220 << 10
_MOST_STAGES = 4
_MOST_SPLITS = 8
# At this row count, a program takes more outputs if there are enough for all multiprocessors: with fewer outputs the
# tensor cores wait for unpacking, and with more rows the sums would not fit into registers.
_WIDE, _WIDE_ROWS = 128, 64
# Inputs per loop iteration: with fewer, the loop's own instructions would outweigh those that unpack weights.
_A_TURN = 256


def default_tiling(rows: int, weight: Packed, *, gated: bool, multiprocessors: int = 132) -> DotTiling:
    (out_features, in_features), copies = weight.shape, 2 if gated else 1
    outs, ins = out_features // copies, max(weight.block, _A_TURN if rows <= 32 else 128)
    if block_rows(rows) == _WIDE_ROWS and not gated and outs >= _WIDE * multiprocessors:
        return DotTiling(_WIDE, ins, warps=4, stages=3)
    # The sums of 256 rows fill the registers of two groups of warps.
    warps = 8 if block_rows(rows) * copies > 128 else 4
    block = ins * (weight.bits * 64 * copies // 8 + 2 * block_rows(rows))
    # Unpacking takes many warps to keep a multiprocessor busy: as many programs as there is room for, with three blocks
    # in flight each.
    room = max(1, min(4 if rows <= 64 else 2, _SHARED_MEMORY // (3 * block)))
    programs, splits = -(-outs // 64), 1
    most = _MOST_SPLITS if rows <= 32 else _MOST_SPLITS // 2
    while not gated and splits < most and 1.5 * programs * splits <= room * multiprocessors:
        if in_features < 4 * ins * splits:
            break
        splits *= 2
    return DotTiling(64, ins, warps, stages=max(2, min(_MOST_STAGES, _SHARED_MEMORY // room // block)), splits=splits)


def packed_dot(
    x: Tensor,
    weight: Packed,
    out: Tensor,
    tiling: DotTiling,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it. The first call on a device must not be inside a graph capture, because it
    allocates the counters of split matmuls.
    """
    rows, in_features = x.shape
    outs = weight.shape[0] // epilogue.copies
    tiles, splits = triton.cdiv(outs, tiling.outs), tiling.splits
    assert rows <= MOST_ROWS
    assert tiles <= MOST_TILES
    assert splits == 1 or not epilogue.gated
    partials, counters = x, weight.pairs
    if splits > 1:
        partials = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    block = weight.block
    blocks, a_turn = in_features // block, max(1, tiling.ins // block)
    _dot_kernel[(tiles, splits)](
        TensorDescriptor.from_tensor(x, [block_rows(rows), block]),
        TensorDescriptor.from_tensor(weight.words, [tiling.outs, block * weight.bits // 32]),
        weight.pairs,
        epilogue.bias_or(weight.pairs),
        out,
        partials,
        counters,
        rows,
        outs,
        out.stride(0),
        blocks,
        triton.cdiv(blocks, splits * a_turn) * a_turn,
        weight.pairs.shape[1],
        blocks_a_group=weight.group // block,
        bits=weight.bits,
        block=block,
        a_turn=a_turn,
        has_minimum=weight.has_minimum,
        block_rows=block_rows(rows),
        block_out=tiling.outs,
        splits=splits,
        **epilogue.flags,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["rows", "blocks", "blocks_a_split", "groups"])
def _dot_kernel(
    x_blocks: tl.tensor,
    word_blocks: tl.tensor,
    pairs: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    out_stride: tl.tensor,
    blocks: tl.tensor,
    blocks_a_split: tl.tensor,
    groups: tl.tensor,
    blocks_a_group: tl.constexpr,
    bits: tl.constexpr,
    block: tl.constexpr,
    a_turn: tl.constexpr,
    has_minimum: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    multiplier: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
    split = tl.program_id(1)
    first, begin = tl.program_id(0) * block_out, split * blocks_a_split
    n = first + tl.arange(0, block_out)
    inside = n < outs
    if pdl:
        gdc_wait()

    m = tl.arange(0, block_rows)
    target = out + m[None, :] * out_stride
    keep = inside[:, None] & (m < rows)[None, :]
    before = previous(target + n[:, None], keep, adds)
    main = tl.zeros([block_out, block_rows], tl.float32)
    up = main
    pairs_at = pairs + n.to(tl.int64) * groups
    up_pairs_at = pairs_at + outs.to(tl.int64) * groups
    for start in range(begin, tl.minimum(begin + blocks_a_split, blocks), a_turn):
        for turn in tl.static_range(a_turn):
            # Beyond the inputs, where a last turn may reach, the copy engine returns zeros.
            index = start + turn
            value = x_blocks.load([0, index * block])
            there = inside & (index < blocks)
            group = index // blocks_a_group
            words = word_blocks.load([first, index * (block * bits // 32)])
            main += _matmul(words, tl.load(pairs_at + group, mask=there, other=0), value, bits, has_minimum)
            if gated:
                words = word_blocks.load([outs + first, index * (block * bits // 32)])
                up += _matmul(words, tl.load(up_pairs_at + group, mask=there, other=0), value, bits, has_minimum)
    conclude(
        main,
        up,
        before,
        bias,
        bias,
        out,
        partials,
        counters,
        rows,
        outs,
        out_stride,
        splits,
        False,
        has_bias,
        adds,
        activation,
        gated,
        multiplier,
    )


@triton.jit
def _matmul(
    words: tl.tensor, pairs: tl.tensor, value: tl.tensor, bits: tl.constexpr, has_minimum: tl.constexpr
) -> tl.tensor:
    """[outs, rows]: one block's matmul. Its scale per output multiplies the sums of integer products."""
    scale, second = halves(pairs)
    zero = tl.zeros_like(second) if has_minimum else second
    weights = integers(words, zero, bits, value.dtype)
    total = tl.dot(weights, value.T, input_precision="ieee") * scale[:, None]
    if has_minimum:
        # The tensor cores compute the sums of the inputs as well.
        total += tl.dot(tl.full(weights.shape, 1.0, value.dtype), value.T, input_precision="ieee") * second[:, None]
    return total

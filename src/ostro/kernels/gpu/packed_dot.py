"""Small-batch matmul with packed weights of 4 or 8 bits on tensor cores: see `dot_linear`.

The words come through shared memory into the very registers from which the tensor cores take their first operand, and
are widened there to the inputs' number format: `packed_words` orders codes so that nothing moves between threads.

Knows shapes; knows no layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ostro.kernels.gpu.dot_linear import MOST_TILES, arrival_counters, conclude
from ostro.kernels.gpu.epilogue import previous
from ostro.kernels.gpu.packed_layout import SLICE, block_inputs
from ostro.kernels.gpu.packed_words import Packed, factors, widened_words
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling, block_rows

_SHARED_MEMORY = 220 << 10
_MOST_STAGES = 12
_MOST_SPLITS = 8


def default_tiling(
    rows: int, out_features: int, in_features: int, *, bits: int, gated: bool, multiprocessors: int = 132
) -> DotTiling:
    """`out_features` counts the weight's rows, both gate and up."""
    outs, copies, ins = out_features // (2 if gated else 1), 2 if gated else 1, block_inputs(bits)
    # The sums of 256 rows fill the registers of two groups of warps.
    wide = rows > 128
    block_out = 128 if wide and not gated else 64
    programs, splits = -(-outs // block_out), 1
    # Two programs share a multiprocessor, unless one fills it.
    enough = (0.7 if wide else 1.4) * multiprocessors
    while not gated and splits < _MOST_SPLITS and programs * splits < enough and in_features >= 8 * ins * splits:
        splits *= 2
    block = 4 * SLICE * block_out * copies + 2 * ins * block_rows(rows)
    memory = _SHARED_MEMORY // (1 if wide or programs * splits <= multiprocessors else 2)
    stages = max(2, min(_MOST_STAGES, memory // block))
    return DotTiling(block_out, ins, 8 if wide else 4, stages=stages, splits=splits)


def packed_dot(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out: Tensor,
    tiling: DotTiling,
    *,
    adds: bool = False,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it. The first call on a device must not be inside a graph capture, because it
    allocates the counters of split matmuls.
    """
    rows, in_features = x.shape
    outs = weight.shape[0] // (2 if gated else 1)
    tiles, splits = triton.cdiv(outs, tiling.outs), tiling.splits
    assert rows <= MOST_ROWS
    assert tiles <= MOST_TILES
    assert splits == 1 or not gated
    assert tiling.ins == block_inputs(weight.bits), "a step of the loop is one block of words"
    partials, counters = x, weight.pairs
    if splits > 1:
        partials = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    blocks = in_features // tiling.ins
    _dot_kernel[(tiles, splits)](
        TensorDescriptor.from_tensor(x, [block_rows(rows), tiling.ins]),
        TensorDescriptor.from_tensor(weight.words, [tiling.outs, SLICE]),
        weight.pairs,
        weight.pairs if bias is None else bias,
        out,
        partials,
        counters,
        rows,
        outs,
        out.stride(0),
        blocks,
        triton.cdiv(blocks, splits),
        weight.pairs.shape[1],
        weight.blocks_a_group,
        bits=weight.bits,
        groups_a_block=weight.groups_a_block,
        has_minimum=weight.has_minimum,
        block_rows=block_rows(rows),
        block_out=tiling.outs,
        splits=splits,
        has_bias=bias is not None,
        adds=adds,
        activation=activation or "",
        gated=gated,
        multiplier=multiplier,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["rows", "blocks", "blocks_a_split", "groups", "blocks_a_group"])
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
    blocks_a_group: tl.tensor,
    bits: tl.constexpr,
    groups_a_block: tl.constexpr,
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
    ins: tl.constexpr = 16 * (32 // bits)
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
    for block in range(begin, tl.minimum(begin + blocks_a_split, blocks)):
        value = x_blocks.load([0, block * ins])
        by = _factors(pairs_at, block, inside, blocks_a_group, groups_a_block, has_minimum)
        weights = widened_words(word_blocks.load([first, block * 16]), by, bits, value.dtype)
        main = tl.dot(weights, value.T, main, input_precision="ieee")
        if gated:
            by = _factors(up_pairs_at, block, inside, blocks_a_group, groups_a_block, has_minimum)
            weights = widened_words(word_blocks.load([outs + first, block * 16]), by, bits, value.dtype)
            up = tl.dot(weights, value.T, up, input_precision="ieee")
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
def _factors(
    at: tl.tensor,
    block: tl.tensor,
    inside: tl.tensor,
    blocks_a_group: tl.tensor,
    groups_a_block: tl.constexpr,
    has_minimum: tl.constexpr,
) -> tl.tuple:
    """[outs, 1] each, for each group of the block."""
    found = ()  # type: tuple[tl.tuple, ...]
    for group in tl.static_range(groups_a_block):
        index = block // blocks_a_group if groups_a_block == 1 else block * groups_a_block + group
        lower, upper, offset = factors(tl.load(at + index, mask=inside, other=0), has_minimum)
        found += ((lower[:, None], upper[:, None], offset[:, None]),)
    return found

"""Small-batch matmul on tensor cores: up to 256 rows, all in one tile, for steps that are bound by reading weights.

The weight is the first operand, so that the tensor cores read it from shared memory, 64 outputs at a time, where the
copy engine has put it. A row's result never depends on the other rows. 8-bit weights are widened on the way, unless
the inputs have 8 bits too.

Norms stay in kernels of their own. Fusing them, as row factors from sums of squares that the previous matmul leaves
behind, gained nothing on an H200 (from 2 % slower to 1 % faster), since a norm's kernel overlaps with the next one's
loads.

For programmatic dependent launch (`pdl`) see `small_batch`. Knows shapes; knows no layers.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ostro.kernels.gpu.epilogue import NO_EPILOGUE, Epilogue, finish, previous
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling, block_rows

MOST_TILES = 65536
_ALIGNMENT = 16


def dot_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiling: DotTiling,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it. Each row of the weight may have a `scale`, and each row of x one in
    `x_scale`, [rows, 1]. The first call on a device must not be inside a graph capture, because it allocates the
    counters of split matmuls.
    """
    rows, in_features = x.shape
    outs = weight.shape[0] // epilogue.copies
    tiles, splits = triton.cdiv(outs, tiling.outs), tiling.splits
    assert rows <= MOST_ROWS
    assert tiles <= MOST_TILES
    assert splits == 1 or not epilogue.gated
    for each in (x, weight):
        assert each.stride(0) * each.element_size() % _ALIGNMENT == 0, "the copy engine reads whole 16 bytes"
    partials, counters = x, x
    if splits > 1:
        partials = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
        counters = arrival_counters(x.device)
    ins_a_split = triton.cdiv(in_features, splits * tiling.ins) * tiling.ins
    held = min(tiling.held, ins_a_split // tiling.ins)
    nothing = x
    _dot_kernel[(tiles, splits)](
        TensorDescriptor.from_tensor(x, [block_rows(rows), tiling.ins]),
        TensorDescriptor.from_tensor(weight, [tiling.outs, tiling.ins]),
        weight,
        nothing if scale is None else scale,
        nothing if x_scale is None else x_scale,
        epilogue.bias_or(nothing),
        out,
        partials,
        counters,
        rows,
        outs,
        out.stride(0),
        in_features,
        ins_a_split,
        block_rows=block_rows(rows),
        block_out=tiling.outs,
        block_in=tiling.ins,
        splits=splits,
        held=held,
        loops=held * tiling.ins < ins_a_split,
        has_scale=scale is not None,
        has_x_scale=x_scale is not None,
        **epilogue.flags,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


def most_shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """How many programs of each tile have finished: zero between kernels. Shared by all kernels, as those of a stream
    run in turn.
    """
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x_blocks: tl.tensor,
    weight_blocks: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    x_scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    out_stride: tl.tensor,
    in_features: tl.tensor,
    ins_a_split: tl.tensor,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    splits: tl.constexpr,
    held: tl.constexpr,
    loops: tl.constexpr,
    has_scale: tl.constexpr,
    has_x_scale: tl.constexpr,
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
    first, begin = tl.program_id(0) * block_out, split * ins_a_split
    n = first + tl.arange(0, block_out)
    inside = n < outs
    main_held = ()  # type: tuple[tl.tensor, ...]
    up_held = ()  # type: tuple[tl.tensor, ...]
    for block in tl.static_range(held):
        k = begin + block * block_in + tl.arange(0, block_in)
        at = weight + n.to(tl.int64)[:, None] * in_features + k[None, :]
        there = inside[:, None] & (k < in_features)[None, :]
        main_held += (tl.load(at, mask=there, other=0.0, eviction_policy="evict_first"),)
        if gated:
            at += outs.to(tl.int64) * in_features
            up_held += (tl.load(at, mask=there, other=0.0, eviction_policy="evict_first"),)
    if pdl:
        gdc_wait()

    m = tl.arange(0, block_rows)
    target = out + m[None, :] * out_stride
    keep = inside[:, None] & (m < rows)[None, :]
    before = previous(target + n[:, None], keep, adds)
    main = tl.zeros([block_out, block_rows], tl.float32)
    up = main
    # Beyond the inputs, where a last split may reach, the copy engine returns zeros.
    for block in tl.static_range(held):
        value = x_blocks.load([0, begin + block * block_in])
        main = _add_dot(main, main_held[block], value)
        if gated:
            up = _add_dot(up, up_held[block], value)
    if loops:
        for start in range(begin + held * block_in, begin + ins_a_split, block_in):
            value = x_blocks.load([0, start])
            main = _add_dot(main, weight_blocks.load([first, start]), value)
            if gated:
                up = _add_dot(up, weight_blocks.load([outs + first, start]), value)

    if has_x_scale:
        by = tl.load(x_scale + m, mask=m < rows, other=0.0)[None, :]
        main *= by
        up *= by
    conclude(
        main,
        up,
        before,
        scale,
        bias,
        out,
        partials,
        counters,
        rows,
        outs,
        out_stride,
        splits,
        has_scale,
        has_bias,
        adds,
        activation,
        gated,
        multiplier,
    )


@triton.jit
def conclude(
    main: tl.tensor,
    up: tl.tensor,
    before: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    out_stride: tl.tensor,
    splits: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    multiplier: tl.constexpr,
) -> None:
    """Adds up the splits, applies the epilogue to a tile's sums, [outs, rows], and stores them."""
    block_out: tl.constexpr = main.shape[0]
    block_rows: tl.constexpr = main.shape[1]
    split = tl.program_id(1)
    n, m = tl.program_id(0) * block_out + tl.arange(0, block_out), tl.arange(0, block_rows)
    target = out + m[None, :] * out_stride
    keep = (n < outs)[:, None] & (m < rows)[None, :]
    column = n[:, None]
    if splits == 1:
        finish(
            main,
            up,
            before,
            scale,
            bias,
            target,
            column,
            keep,
            outs,
            has_scale,
            has_bias,
            adds,
            activation,
            gated,
            multiplier,
        )
    else:
        # The last program to finish adds all parts, including its own, always in the same order.
        part = partials + m[None, :] * outs + column
        part_size = rows.to(tl.int64) * outs
        tl.store(part + split * part_size, main, mask=keep)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            total = tl.zeros([block_out, block_rows], tl.float32)
            for other in tl.static_range(splits):
                total += tl.load(part + other * part_size, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(counters + tl.program_id(0), 0)
            finish(
                total,
                total,
                before,
                scale,
                bias,
                target,
                column,
                keep,
                outs,
                has_scale,
                has_bias,
                adds,
                activation,
                gated,
                multiplier,
            )


@triton.jit
def _add_dot(total: tl.tensor, weights: tl.tensor, rows: tl.tensor) -> tl.tensor:
    if rows.dtype.is_fp8():
        # The tensor cores' own accumulators keep about 14 bits of 8-bit products, so each block's sum is added in
        # float32.
        total = tl.dot(weights, rows.T, total, max_num_imprecise_acc=weights.shape[1])
    else:
        # 8-bit floats convert to 16 bits exactly.
        total = tl.dot(weights.to(rows.dtype), rows.T, total, input_precision="ieee")
    return total

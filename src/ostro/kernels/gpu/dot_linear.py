"""Small-batch matmul on tensor cores: up to 256 rows, all in one tile, for steps that are bound by reading weights.

    x ─> · weightᵀ ─(· norm factors)─(· scales)─(+ bias)─┬───────────────────────────> out
                                                         ├─(· multiplier + residual)─> residual, in place ─> squares
                                                         ├─ act ─────────────────────> out
                                                         └─ act(gate) * up ──────────> out, gate above up in the weight

The weight is the first operand, so that the tensor cores read it from shared memory, 64 outputs at a time, where the
copy engine has put it. A row's result never depends on the other rows. 8-bit weights are widened on the way, unless
the inputs have 8 bits too.

An RMS norm before the matmul is one factor per row, once the norm's weight is part of the matrix. The factors follow
from the rows' sums of squares, which the matmul before, whose result was added to the residual, leaves behind for each
tile of its outputs (`squares`). The alternative, to square x's blocks in the loop, is not safe with Triton 3.7: a block
that is not only an operand of the dot gets one buffer too few, and is overwritten while the tensor cores read it.

For programmatic dependent launch (`pdl`) see `small_batch`. Knows shapes; knows no layers.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ostro.kernels.gpu.epilogue import finish, previous
from ostro.kernels.gpu.tilings import MOST_ROWS, DotTiling, block_rows, power_of_two

MOST_TILES = 65536
_ALIGNMENT = 16
# Compiled for Hopper, kernels with twice as many spill registers.
_SQUARES_A_THREAD = 64


class RowNorm(NamedTuple):
    """An RMS norm of x whose weight is part of the matrix."""

    squares: Tensor
    """[parts, rows], float32: sums of squares of parts of each row."""
    eps: float


def empty_squares(residual: Tensor, tiling: DotTiling) -> Tensor:
    """For what a matmul leaves that is added to the residual: one part for each tile of outputs."""
    rows, outs = residual.shape
    return torch.empty(triton.cdiv(outs, tiling.outs), rows, dtype=torch.float32, device=residual.device)


def holds_squares(squares: Tensor, tiling: DotTiling) -> bool:
    """Whether a matmul with this tiling has registers for them: it can norm its inputs then."""
    parts, rows = squares.shape
    return power_of_two(parts) * block_rows(rows) <= _SQUARES_A_THREAD * 32 * tiling.warps


def dot_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiling: DotTiling,
    *,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    norm: RowNorm | None = None,
    adds: bool = False,
    squares: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> None:
    """Writes out [rows, outs], or adds to it. The weight's rows have a `scale` each, and so have those of x, `x_scale`,
    [rows, 1]. `squares`, made by `empty_squares`, receives those of the sums. The first call on a device must not be
    inside a graph capture, because it allocates the counters of split matmuls.
    """
    rows, in_features = x.shape
    outs = weight.shape[0] // (2 if gated else 1)
    tiles, splits = triton.cdiv(outs, tiling.outs), tiling.splits
    assert rows <= MOST_ROWS
    assert tiles <= MOST_TILES
    assert splits == 1 or not gated
    assert squares is None or (adds and squares.shape == (tiles, rows))
    assert norm is None or (norm.squares.shape[1] == rows and holds_squares(norm.squares, tiling))
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
        nothing if bias is None else bias,
        out,
        partials,
        counters,
        rows,
        outs,
        out.stride(0),
        in_features,
        ins_a_split,
        nothing if norm is None else norm.squares,
        0.0 if norm is None else norm.eps,
        0 if norm is None else len(norm.squares),
        nothing if squares is None else squares,
        block_rows=block_rows(rows),
        block_out=tiling.outs,
        block_in=tiling.ins,
        splits=splits,
        held=held,
        loops=held * tiling.ins < ins_a_split,
        has_scale=scale is not None,
        has_x_scale=x_scale is not None,
        norm_parts=0 if norm is None else power_of_two(len(norm.squares)),
        has_bias=bias is not None,
        adds=adds,
        leaves_squares=squares is not None,
        activation=activation or "",
        gated=gated,
        multiplier=multiplier,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


def most_shared_memory(device: torch.device) -> int:
    """Bytes that a program may use on a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """Number of a tile's finished programs: zero between kernels. Shared, as a stream's kernels run in turn."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows", "num_parts"])
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
    norm_squares: tl.tensor,
    norm_eps: tl.tensor,
    num_parts: tl.tensor,
    squares: tl.tensor,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    splits: tl.constexpr,
    held: tl.constexpr,
    loops: tl.constexpr,
    has_scale: tl.constexpr,
    has_x_scale: tl.constexpr,
    norm_parts: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    leaves_squares: tl.constexpr,
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
    if norm_parts > 0:
        # Loaded early, added up late, like what the result is added to.
        p = tl.arange(0, norm_parts)[:, None]
        of_parts = tl.load(norm_squares + p * rows + m[None, :], mask=(p < num_parts) & (m < rows)[None, :], other=0.0)
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
    column = n[:, None]
    if norm_parts > 0:
        factor = tl.rsqrt(tl.sum(of_parts, 0) / in_features + norm_eps)[None, :]
        main *= factor
        up *= factor
    if splits == 1:
        stored = finish(
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
        if leaves_squares:
            _leave_squares(squares + tl.program_id(0) * rows + m, stored, keep, m < rows)
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
            stored = finish(
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
            if leaves_squares:
                _leave_squares(squares + tl.program_id(0) * rows + m, stored, keep, m < rows)


@triton.jit
def _add_dot(total: tl.tensor, weights: tl.tensor, rows: tl.tensor) -> tl.tensor:
    if rows.dtype.is_fp8():
        # The tensor cores' own sums of 8-bit products keep about 14 bits: a block's is added in float32.
        total = tl.dot(weights, rows.T, total, max_num_imprecise_acc=weights.shape[1])
    else:
        # 8-bit floats convert to 16 bits exactly.
        total = tl.dot(weights.to(rows.dtype), rows.T, total, input_precision="ieee")
    return total


@triton.jit
def _leave_squares(at: tl.tensor, stored: tl.tensor, keep: tl.tensor, inside: tl.tensor) -> None:
    wide = tl.where(keep, stored.to(tl.float32), 0.0)
    tl.store(at, tl.sum(wide * wide, 0), mask=inside)

"""The matmuls of a mixture of experts, for any number of rows, on tensor cores.

    x [rows, in] ─(rows of each tile)─> · up of the tile's expert ── act(gate) * up ──> inner [slots, inner], by expert
    inner ────────────────────────────> · down of the expert ─────────────────────────> outer [slots, out], by row
    outer ────────────────────────────> weighted sum of each row's slots ─────────────> out, or added to the residual

A program computes one tile of `routing.RowTiles` for some outputs. With few rows per expert, reading weights is the
bottleneck, so the weight is the first operand, as in `dot_linear`; with many, it stays so. A row's slots are added up
in the order of its experts' logits, and with tiles of a fixed height its result does not depend on any other row. For a
single row see `single_experts`.

A kernel lets the next one start once it has itself waited (`small_batch` explains programmatic dependent launch). The
next one may then read, before it waits, whatever was complete when this one began: the lists of tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ostro.kernels.gpu.mlp import GATES, gate_up
from ostro.kernels.gpu.routing import Routed, RowTiles
from ostro.kernels.gpu.tilings import power_of_two

ALIGNMENT = 16
"""The copy engine needs weights whose rows are multiples of this many bytes."""
_SUM_BLOCK = 1024


class Matrices(NamedTuple):
    """One matrix of every expert, stacked."""

    weight: Tensor
    """[experts, out, in]."""
    bias: Tensor | None = None
    """[experts, out]."""


class Shared(NamedTuple):
    """An MLP's results that are added to the experts', each row times the sigmoid of its gate."""

    rows: Tensor
    gate: Tensor | None
    """[rows], a column of the router's logits."""


class Ending(NamedTuple):
    """What is done with each row's weighted sum of experts."""

    shared: Shared | None = None
    """Rows of a shared MLP, added to the sum."""
    residual: Tensor | None = None
    """[rows, out]: the sum, times the multiplier, is added to it in place."""
    multiplier: float = 1.0


class TileShape(NamedTuple):
    """How a tile's matmul is divided."""

    outs: int
    """Outputs per program; with gate and up, this many of each."""
    ins: int
    warps: int
    stages: int


# By tile height, with and without gate and up. With short tiles, two programs' loads in flight fill a multiprocessor's
# shared memory.
GATED = {
    16: TileShape(64, 64, 4, 6),
    32: TileShape(64, 64, 4, 5),
    64: TileShape(64, 64, 4, 4),
    128: TileShape(128, 64, 8, 4),
}
UNGATED = {
    16: TileShape(128, 64, 4, 6),
    32: TileShape(128, 64, 4, 5),
    64: TileShape(128, 64, 4, 4),
    128: TileShape(128, 64, 8, 4),
}
# In 32 bits, tiles must fit in registers.
_WIDE = TileShape(32, 32, 4, 2)


def inner_rows(x: Tensor, up: Matrices, rows: RowTiles, chosen: int, activation: str, *, pdl: bool = False) -> Tensor:
    """x [rows, in], up [experts, 2 * inner, in], gate above up -> [slots, inner], sorted by expert."""
    assert activation in GATES, activation
    out = torch.empty(len(rows.slots), up.weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    _multiply(x, up, rows, out, chosen=chosen, gathers=True, activation=activation, pdl=pdl)
    return out


def outer_rows(inner: Tensor, down: Matrices, rows: RowTiles, *, pdl: bool = False) -> Tensor:
    """inner as `inner_rows` returns it, down [experts, out, inner] -> [slots, out], sorted by row."""
    out = torch.empty(len(rows.slots), down.weight.shape[1], dtype=inner.dtype, device=inner.device)
    _multiply(inner, down, rows, out, chosen=1, gathers=False, activation="", pdl=pdl)
    return out


def add_up(
    outer: Tensor, routed: Routed | None, ending: Ending, *, dtype: torch.dtype | None = None, pdl: bool = False
) -> Tensor:
    """outer [slots, out], sorted by row -> [rows, out]: each row's weighted sum, or the residual. Without `routed`,
    outer has the sums. `dtype` is the result's if there is no residual; None is outer's.
    """
    shared, residual, multiplier = ending
    assert residual is not None or multiplier == 1.0
    rows, chosen = (len(outer), 1) if routed is None else routed.weights.shape
    width = outer.shape[1]
    out = torch.empty(rows, width, dtype=dtype or outer.dtype, device=outer.device) if residual is None else residual
    gate = None if shared is None else shared.gate
    _sum_kernel[(rows, triton.cdiv(width, _SUM_BLOCK))](
        outer,
        outer if routed is None else routed.weights,
        outer if shared is None else shared.rows,
        outer if gate is None else gate,
        out,
        width,
        out.stride(0),
        0 if gate is None else gate.stride(0),
        chosen=chosen,
        has_weights=routed is not None,
        has_shared=shared is not None,
        has_gate=gate is not None,
        adds=residual is not None,
        multiplier=multiplier,
        block=_SUM_BLOCK,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def _multiply(
    x: Tensor,
    matrices: Matrices,
    rows: RowTiles,
    out: Tensor,
    *,
    chosen: int,
    gathers: bool,
    activation: str,
    pdl: bool,
) -> None:
    weight, bias = matrices
    (experts, _, in_features), outs = weight.shape, out.shape[1]
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert in_features * weight.element_size() % ALIGNMENT == 0
    tiling = _WIDE if x.element_size() > 2 else (GATED if activation else UNGATED)[rows.height]
    ins = min(tiling.ins, max(16, power_of_two(in_features)))
    out_tiles = triton.cdiv(outs, tiling.outs)
    flat = weight.view(experts * weight.shape[1], in_features)
    _tile_kernel[(rows.most * out_tiles,)](
        x,
        TensorDescriptor.from_tensor(flat, [tiling.outs, ins]),
        x if bias is None else bias,
        out,
        rows.slots,
        rows.tiles,
        outs,
        in_features,
        x.stride(0),
        out_tiles,
        chosen=chosen,
        gathers=gathers,
        block_rows=rows.height,
        block_out=tiling.outs,
        block_in=ins,
        even_in=in_features % ins == 0,
        has_bias=bias is not None,
        activation=activation,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["out_tiles"])
def _tile_kernel(
    x: tl.tensor,
    weight_blocks: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    tiles: tl.tensor,
    outs: tl.tensor,
    in_features: tl.tensor,
    x_stride: tl.tensor,
    out_tiles: tl.tensor,
    chosen: tl.constexpr,
    gathers: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    even_in: tl.constexpr,
    has_bias: tl.constexpr,
    activation: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """With an activation, the weight has gates above ups. `gathers` if x is sorted by row and the result by expert;
    otherwise it is the other way round.
    """
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0) // out_tiles
    first_out = tl.program_id(0) % out_tiles * block_out
    number = tl.load(tiles)
    if tile < number:
        expert, first, end = tl.load(tiles + 1 + tile * 3), tl.load(tiles + 2 + tile * 3), tl.load(tiles + 3 + tile * 3)
        place = first + tl.arange(0, block_rows)
        here = place < end
        slot = tl.load(slots + place, mask=here, other=0)
        row, target = (slot // chosen, place) if gathers else (tl.where(here, place, 0), slot)
        source = x + row.to(tl.int64)[:, None] * x_stride
        # Rows of the next expert, or zeros beyond the last, are not stored.
        begin = expert * outs + first_out
        if activation != "":
            begin += expert * outs
        main = tl.zeros([block_out, block_rows], tl.float32)
        up = main
        for start in range(0, in_features, block_in):
            k = start + tl.arange(0, block_in)[None, :]
            there = here[:, None] if even_in else here[:, None] & (k < in_features)
            value = tl.load(source + k, mask=there, other=0.0).T
            main = tl.dot(weight_blocks.load([begin, start]), value, main, input_precision="ieee")
            if activation != "":
                up = tl.dot(weight_blocks.load([begin + outs, start]), value, up, input_precision="ieee")
        n = first_out + tl.arange(0, block_out)[:, None]
        if has_bias:
            main += tl.load(bias + begin - first_out + n, mask=n < outs, other=0.0).to(tl.float32)
        if activation != "":
            if has_bias:
                up += tl.load(bias + begin - first_out + outs + n, mask=n < outs, other=0.0).to(tl.float32)
            main = gate_up(main, up, activation)
        at = out + target.to(tl.int64)[None, :] * outs + n
        tl.store(at, main.to(out.dtype.element_ty), mask=(n < outs) & here[None, :])


@triton.jit
def _sum_kernel(
    outer: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    out_stride: tl.tensor,
    gate_stride: tl.tensor,
    chosen: tl.constexpr,
    has_weights: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
    adds: tl.constexpr,
    multiplier: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], tl.float32)
    for rank in tl.static_range(chosen):
        slot = row * chosen + rank
        own = tl.load(outer + slot * width + column, mask=inside, other=0.0)
        total += tl.load(weights + slot) * own if has_weights else own
    if has_shared:
        beside = tl.load(shared + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if has_gate:
            beside *= tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
        total += beside
    at = out + row * out_stride + column
    if adds:
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + total * multiplier
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)

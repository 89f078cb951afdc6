"""Batch-invariant matmul: a row's result is bitwise identical whatever the other rows are, for any number of rows.

A sum depends on the order of its terms, so the order depends on the weight's shape alone: the inputs are split into
sections, each is summed from its start by the same tensor core instructions, and the sections' sums are added in order.
Which program adds them does not matter:

    few rows     a program a section; the last to arrive adds up      many rows     one program, section after section

Row tiles have one size, padded with zeros, so that the instruction is the same however many rows there are. The tile's
height in outputs may vary, because the instruction takes 64 of them whatever the tile.

Knows shapes; knows no layers. The plain twin is `small_linear_plain`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.dot_linear import MOST_TILES, arrival_counters


@dataclass(frozen=True, slots=True)
class InvariantTiling:
    """`rows` and `ins` affect the result's bits, so they are the same for all matmuls of a dtype."""

    rows: int
    ins: int
    outs: int
    warps: int
    stages: int
    outs_of_many: int
    warps_of_many: int


# Exact float32 matmuls do not run on tensor cores, and a tile must fit in registers.
_WIDE = InvariantTiling(rows=32, ins=32, outs=32, warps=4, stages=2, outs_of_many=32, warps_of_many=4)
_HALF = InvariantTiling(rows=128, ins=64, outs=64, warps=4, stages=4, outs_of_many=128, warps_of_many=8)
# Up to this many row tiles, each section has its own program; the memory for the sections' sums grows with them.
_FEW_TILES = 4
# Desired number of programs for a few-row matmul, unless its sections would become too short.
_PROGRAMS = 256
_SHORTEST_SECTION = 512
# Row tiles processed before moving on to the next outputs: their inputs stay in the cache.
_GROUP = 8


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out], for any number of rows.

    The first call on a device must not be inside a graph capture: it allocates the counters of sections.
    """
    (rows, ins), outs = x.shape, weight.shape[0]
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    tiling = tiling_for(x.dtype)
    num_sections = sections(outs, ins, tiling)
    row_tiles = triton.cdiv(rows, tiling.rows)
    few = row_tiles <= _FEW_TILES
    block_out, warps = (tiling.outs, tiling.warps) if few else (tiling.outs_of_many, tiling.warps_of_many)
    out_tiles = triton.cdiv(outs, block_out)
    shared = few and num_sections > 1
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    sums, arrived = x, x
    if shared:
        assert row_tiles * out_tiles <= MOST_TILES
        sums = torch.empty(num_sections, rows, outs, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    _matmul_kernel[(row_tiles * out_tiles, num_sections if shared else 1)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        sums,
        arrived,
        rows,
        outs,
        x.stride(0),
        in_features=ins,
        section_ins=triton.cdiv(ins, num_sections * tiling.ins) * tiling.ins,
        sections=num_sections,
        shared=shared,
        block_rows=tiling.rows,
        block_out=block_out,
        block_in=tiling.ins,
        group=_GROUP,
        even_out=outs % block_out == 0,
        even_in=ins % (num_sections * tiling.ins) == 0,
        has_bias=bias is not None,
        pdl=pdl,
        num_warps=warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )
    return out


def tiling_for(dtype: torch.dtype) -> InvariantTiling:
    return _HALF if dtype.itemsize <= 2 else _WIDE


def sections(outs: int, ins: int, tiling: InvariantTiling) -> int:
    """The number of sections that a weight's inputs are split into: a power of two."""
    programs, cut = triton.cdiv(outs, tiling.outs), 1
    while 2 * cut * programs <= _PROGRAMS and ins >= 2 * cut * _SHORTEST_SECTION:
        cut *= 2
    return cut


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    x_stride: tl.tensor,
    in_features: tl.constexpr,
    section_ins: tl.constexpr,
    sections: tl.constexpr,
    shared: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    group: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
    has_bias: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row_tiles = tl.cdiv(rows, block_rows)
    out_tiles = tl.cdiv(outs, block_out)
    tile = tl.program_id(0)
    first = tile // (group * out_tiles) * group
    height = tl.minimum(row_tiles - first, group)
    within = tile % (group * out_tiles)
    m = (first + within % height) * block_rows + tl.arange(0, block_rows).to(tl.int64)
    n = within // height * block_out + tl.arange(0, block_out).to(tl.int64)
    source = x + m * x_stride
    weights = weight + n * in_features
    here, inside = m < rows, n < outs

    if sections == 1:
        total = _section(source, weights, here, inside, 0, section_ins, in_features, block_in, even_out, even_in)
    elif shared:
        section = tl.program_id(1)
        begin = section * section_ins
        part = _section(source, weights, here, inside, begin, section_ins, in_features, block_in, even_out, even_in)
        total = part
    else:
        total = tl.zeros([block_out, block_rows], tl.float32)
        for begin in tl.range(0, sections * section_ins, section_ins, num_stages=1):
            total += _section(
                source, weights, here, inside, begin, section_ins, in_features, block_in, even_out, even_in
            )

    keep = here[:, None] & inside[None, :]
    at = m[:, None] * outs + n[None, :]
    if shared:
        tl.store(sums + section.to(tl.int64) * rows * outs + at, total.T, mask=keep)
        # All threads' stores must precede the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == sections - 1:
            joined = tl.zeros([block_rows, block_out], tl.float32)
            for other in tl.static_range(sections):
                there = sums + other * rows.to(tl.int64) * outs + at
                # Bypasses the L1 cache, which does not see other multiprocessors' writes.
                joined += tl.load(there, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _finish(joined, bias, out + at, n, inside, keep, has_bias)
    else:
        _finish(total.T, bias, out + at, n, inside, keep, has_bias)


@triton.jit
def _section(
    source: tl.tensor,
    weights: tl.tensor,
    here: tl.tensor,
    inside: tl.tensor,
    begin: tl.tensor,
    section_ins: tl.constexpr,
    in_features: tl.constexpr,
    block_in: tl.constexpr,
    even_out: tl.constexpr,
    even_in: tl.constexpr,
) -> tl.tensor:
    """[outs, rows]: the sum over one section, from zero. The last one may extend beyond the inputs, adding zeros."""
    total = tl.zeros([weights.shape[0], source.shape[0]], tl.float32)
    for step in range(0, section_ins, block_in):
        k = begin + step + tl.arange(0, block_in)
        x_at = source[:, None] + k[None, :]
        weight_at = weights[:, None] + k[None, :]
        if even_in:
            value = tl.load(x_at, mask=here[:, None], other=0.0)
        else:
            value = tl.load(x_at, mask=here[:, None] & (k < in_features)[None, :], other=0.0)
        if even_in and even_out:
            by = tl.load(weight_at)
        else:
            by = tl.load(weight_at, mask=inside[:, None] & (k < in_features)[None, :], other=0.0)
        total = tl.dot(by, value.T, total, input_precision="ieee")
    return total


@triton.jit
def _finish(
    y: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    inside: tl.tensor,
    keep: tl.tensor,
    has_bias: tl.constexpr,
) -> None:
    if has_bias:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out, y.to(out.dtype.element_ty), mask=keep)

"""Gated delta nets on a GPU: between the input projections and the output projection. Formulas are those of
`architecture.GatedDelta`; the plain twin is `delta_plain`. Knows slots, and no sequences.

Rows that are their sequences' only ones take one kernel, a program for each row and value head. Chunks take three:

    rows           mixed, gates ──> q, k, v and factors, in float32           each row by itself
    chunks         for each row:    o = what v was of the row, state          one row after the other
    rows           o, z ──> out                                               each row by itself

Every step needs one pass over the state, for what is read of it can be read before it changes:

    p, o = Sᵀk, Sᵀq        d = strength (v - kept p)        o = kept o + (q k) d        S = kept S + k dᵀ

Where results need not have the same bits for all cuts of a chunk, a piece is a block, whose rows are computed together
on tensor cores. G is the sum of the logarithms of `kept` up to a row, and D what is left in row i of what row j wrote:

    pieces    A = strength (k kᵀ D)         below the diagonal
              T = (I + A)⁻¹                 by substitution in parts of 16 rows, which are merged
              W, U = T (strength exp(G) k), T (strength v)
    chunks    U = U - W S    O = exp(G) q S + (q kᵀ D) U    S = exp(G end) S + (exp(G end - G) k)ᵀ U      in order
    pieces    O, z ──> out

In models of bfloat16 the operands are bfloat16, too. S stays in float32: as an operand it is the sum of two numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.state_rows import (
    CHUNK_FIELDS,
    PIECE_FIELDS,
    PIECE_ROWS,
    ChunkTables,
    KeptState,
    SingleRows,
    StateChunk,
)
from ostro.models.architecture import GatedDelta

_QK_EPS = tl.constexpr(GatedDelta.QK_EPS)
_CHUNK_FIELDS, _PIECE_FIELDS = tl.constexpr(CHUNK_FIELDS), tl.constexpr(PIECE_FIELDS)
_BLOCK = tl.constexpr(PIECE_ROWS)
# Rows of a piece that a program convolves at a time.
_CONVOLVED = tl.constexpr(16)
# Rows that a program prepares or finishes at a time.
_ROWS = 16


class DeltaWeights(NamedTuple):
    taps: Tensor
    """float32 [taps, channels], oldest first"""
    bias: Tensor | None
    """float32 [channels]"""
    decay: Tensor
    """float32 [value heads], as is the next"""
    decay_bias: Tensor
    norm: Tensor
    """float32 [value_dim]"""
    eps: float
    tiled: bool
    """Which key head a value head reads: see `architecture.GatedDelta.head_map`."""


class SinglesTiling(NamedTuple):
    warps: int
    registers: int | None
    """A thread's at most, so that more programs fit a multiprocessor."""


class ScanTiling(NamedTuple):
    """How a program keeps its part of a state: some columns of a head's matrix.

        lane    [ a number of rows, every fourth column or so ]

    Sums over rows are each lane's own, and then those of the lanes that share columns. They stay within a warp.
    """

    columns: int
    row_lanes: int
    """Lanes of a warp that share columns; the others have other columns."""
    warps: int
    stages: int
    """Rows that are on the way while one is computed."""


class BlockTiling(NamedTuple):
    columns: int
    """Columns of a head's matrix that a program takes through a chunk."""
    prepare_warps: int
    warps: int
    stages: int
    """Pieces that are on the way while one is computed."""


SINGLES = SinglesTiling(8, 128)
SCAN = ScanTiling(32, 8, 4, 4)
BLOCKS = BlockTiling(64, 4, 4, 2)
# The shortest side of a product of blocks.
_SHORTEST = 64


class _Sizes(NamedTuple):
    """As every kernel takes them."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    key_block: int
    value_block: int
    taps: int
    tiled: bool
    has_bias: bool

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


def delta_singles(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: KeptState,
    rows: SingleRows,
    out: Tensor,
    *,
    pdl: bool = False,
    tiling: SinglesTiling = SINGLES,
) -> None:
    """mixed [rows, …], as [q | k | v | z], and gates [rows, …], as [b | a], -> out [rows, values]. Advances the states.
    Rows without a slot are zeros.
    """
    matrices, sizes = _checked(mixed, gates, weights, state, out)
    assert len(rows.slots) == len(rows.positions) == len(rows.captured) == len(mixed)
    if not len(mixed):
        return
    _singles_kernel[(sizes.value_heads, len(mixed))](
        mixed,
        gates,
        weights.taps,
        weights.taps if weights.bias is None else weights.bias,
        weights.decay,
        weights.decay_bias,
        weights.norm,
        state.inputs,
        matrices,
        rows.slots,
        rows.positions,
        rows.captured,
        out,
        mixed.stride(0),
        gates.stride(0),
        state.inputs.stride(0),
        matrices.stride(0),
        out.stride(0),
        weights.eps,
        **sizes._asdict(),
        pdl=pdl,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        launch_pdl=pdl,
    )


def delta_chunks(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: KeptState,
    tables: ChunkTables,
    out: Tensor,
    *,
    exact: bool,
    pdl: bool = False,
    tiling: ScanTiling = SCAN,
    blocks: BlockTiling = BLOCKS,
) -> None:
    """The same for the rows that the tables name; others of `out` are left alone.

    If `exact`, results have the same bits however rows are cut into chunks and pieces.
    """
    matrices, sizes = _checked(mixed, gates, weights, state, out)
    chunks, pieces = tables
    if not len(chunks) or not len(pieces):
        return
    if not exact:
        seen = _chunks_by_blocks(mixed, gates, weights, state, tables, sizes, pdl, blocks)
        sizes = sizes._replace(value_block=seen.shape[-1])
        _finish(mixed, weights, tables, seen, out, sizes, pdl, blocks=True)
        return
    prepared = mixed.new_empty(len(mixed), 2 * sizes.keys + sizes.values, dtype=torch.float32)
    factors = mixed.new_empty(len(mixed), 2 * sizes.value_heads + sizes.key_heads, dtype=torch.float32)
    _prepare_kernel[(sizes.key_heads + sizes.value_heads, len(pieces))](
        mixed,
        gates,
        weights.taps,
        weights.taps if weights.bias is None else weights.bias,
        weights.decay,
        weights.decay_bias,
        state.inputs,
        chunks,
        pieces,
        prepared,
        factors,
        mixed.stride(0),
        gates.stride(0),
        state.inputs.stride(0),
        **sizes._asdict(),
        rows_block=_ROWS,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    row_lanes = min(tiling.row_lanes, sizes.key_block // 4)
    columns = max(32 // row_lanes, min(tiling.columns, sizes.value_block))
    _scan_kernel[(triton.cdiv(sizes.value_dim, columns), sizes.value_heads, len(chunks))](
        mixed,
        state.inputs,
        matrices,
        chunks,
        pieces,
        prepared,
        factors,
        mixed.stride(0),
        state.inputs.stride(0),
        matrices.stride(0),
        1,
        **sizes._asdict(),
        columns=columns,
        row_lanes=row_lanes,
        stages=tiling.stages,
        pdl=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )
    _finish(mixed, weights, tables, prepared, out, sizes, pdl, blocks=False)


def _chunks_by_blocks(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: KeptState,
    tables: ChunkTables,
    sizes: _Sizes,
    pdl: bool,
    tiling: BlockTiling,
) -> Tensor:
    """What the rows see of the states, as [pieces, value heads, rows, columns]. Advances the states."""
    assert state.matrices is not None
    chunks, pieces = tables
    # Compiled for shorter sides, products read beyond the shared memory that they have.
    sizes = sizes._replace(key_block=max(_SHORTEST, sizes.key_block), value_block=max(_SHORTEST, sizes.value_block))
    dtype = torch.bfloat16 if mixed.dtype == torch.bfloat16 else torch.float32
    each = (len(pieces), sizes.value_heads)
    q, k, w = (mixed.new_empty(*each, PIECE_ROWS, sizes.key_block, dtype=dtype) for _ in range(3))
    likeness = mixed.new_empty(*each, PIECE_ROWS, PIECE_ROWS, dtype=dtype)
    u = mixed.new_empty(*each, PIECE_ROWS, sizes.value_block, dtype=torch.float32)
    kept = mixed.new_empty(*each, dtype=torch.float32)
    _blocks_kernel[each[::-1]](
        mixed,
        gates,
        weights.taps,
        weights.taps if weights.bias is None else weights.bias,
        weights.decay,
        weights.decay_bias,
        state.inputs,
        chunks,
        pieces,
        q,
        k,
        w,
        likeness,
        u,
        kept,
        mixed.stride(0),
        gates.stride(0),
        state.inputs.stride(0),
        **sizes._asdict(),
        pdl=pdl,
        num_warps=tiling.prepare_warps,
        launch_pdl=pdl,
    )
    columns = min(tiling.columns, sizes.value_block)
    _blocks_scan_kernel[(sizes.value_block // columns, sizes.value_heads, len(chunks))](
        mixed,
        state.inputs,
        state.matrices,
        chunks,
        pieces,
        q,
        k,
        w,
        likeness,
        u,
        kept,
        mixed.stride(0),
        state.inputs.stride(0),
        state.matrices.stride(0),
        **sizes._asdict(),
        columns=columns,
        # Blocks in float32 are twice as large: not every GPU has shared memory for two.
        stages=tiling.stages if dtype == torch.bfloat16 else 1,
        pdl=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )
    return u


def _finish(
    mixed: Tensor,
    weights: DeltaWeights,
    tables: ChunkTables,
    seen: Tensor,
    out: Tensor,
    sizes: _Sizes,
    pdl: bool,
    *,
    blocks: bool,
) -> None:
    _finish_kernel[(sizes.value_heads, len(tables.pieces))](
        mixed,
        weights.norm,
        *tables,
        seen,
        out,
        mixed.stride(0),
        out.stride(0),
        weights.eps,
        **sizes._asdict(),
        rows_block=_ROWS,
        blocks=blocks,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def delta_plain(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    state: KeptState,
    chunks: Sequence[StateChunk],
    out: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The twin of both, in torch, computed in this dtype."""
    matrices, sizes = _checked(mixed, gates, weights, state, out)
    taps, channels = weights.taps.shape
    filters, norm = weights.taps.to(dtype), weights.norm.to(dtype)
    times = sizes.value_heads // sizes.key_heads
    for chunk in chunks:
        ring, s = state.inputs[chunk.slot], matrices[chunk.slot].to(dtype)
        rows = slice(chunk.first, chunk.first + chunk.rows)
        before = range(chunk.position - taps + 1, chunk.position)
        known = torch.stack([ring[at % taps] if at >= 0 else torch.zeros_like(ring[0]) for at in before])
        known = torch.cat((known, mixed[rows, :channels]))
        x = torch.stack([filters[tap] * known[tap : tap + chunk.rows].to(dtype) for tap in range(taps)]).sum(0)
        x = F.silu(x if weights.bias is None else x + weights.bias.to(dtype))
        q, k, v = x.split((sizes.keys, sizes.keys, sizes.values), 1)
        q, k = (each.unflatten(1, (sizes.key_heads, sizes.key_dim)) for each in (q, k))
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + GatedDelta.QK_EPS) for each in (q, k))
        q, k = (each.repeat(1, times, 1) if sizes.tiled else each.repeat_interleave(times, 1) for each in (q, k))
        v, z = (each.unflatten(1, (sizes.value_heads, -1)) for each in (v, mixed[rows, channels:].to(dtype)))
        strength, a = gates[rows].to(dtype).chunk(2, 1)
        kept = torch.exp(-weights.decay.to(dtype).exp() * F.softplus(a + weights.decay_bias.to(dtype)))
        s = s if chunk.position else torch.zeros_like(s)
        for row in range(chunk.rows):
            s = s * kept[row, :, None, None]
            written = (v[row] - torch.einsum("hk,hkv->hv", k[row], s)) * strength[row, :, None].sigmoid()
            s = s + k[row, :, :, None] * written[:, None]
            seen = torch.einsum("hk,hkv->hv", q[row], s) * sizes.key_dim**-0.5
            seen = F.rms_norm(seen, seen.shape[-1:], norm, weights.eps) * F.silu(z[row])
            out[chunk.first + row] = seen.flatten().to(out.dtype)
            for kept_slot in (slot for after, slot in _kept(chunk) if after == row + 1):
                matrices[kept_slot] = s.float()
                for back in range(min(taps, chunk.position + row + 1)):
                    at = chunk.position + row - back
                    if row + taps - 1 - back >= 0:
                        state.inputs[kept_slot, at % taps] = known[row + taps - 1 - back]


def _kept(chunk: StateChunk) -> list[tuple[int, int]]:
    return [*chunk.captures, (chunk.rows, chunk.slot)]


def _checked(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, state: KeptState, out: Tensor
) -> tuple[Tensor, _Sizes]:
    matrices = state.matrices
    assert matrices is not None
    assert matrices.dtype == torch.float32
    assert matrices[0].is_contiguous()
    assert state.inputs[0].is_contiguous()
    _, value_heads, key_dim, value_dim = matrices.shape
    taps, channels = weights.taps.shape
    keys = (channels - value_heads * value_dim) // 2
    assert state.inputs.shape[1:] == (taps, channels)
    assert mixed.shape[1] == channels + value_heads * value_dim
    assert gates.shape == (len(mixed), 2 * value_heads)
    assert out.shape == (len(mixed), value_heads * value_dim)
    assert mixed.stride(1) == gates.stride(1) == out.stride(1) == 1
    return matrices, _Sizes(
        keys // key_dim,
        value_heads,
        key_dim,
        value_dim,
        max(16, triton.next_power_of_2(key_dim)),
        max(16, triton.next_power_of_2(value_dim)),
        taps,
        weights.tiled,
        weights.bias is not None,
    )


@triton.jit(do_not_specialize=["slots", "positions", "captured"])
def _singles_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    filters: tl.tensor,
    bias: tl.tensor,
    decay: tl.tensor,
    decay_bias: tl.tensor,
    norm: tl.tensor,
    inputs: tl.tensor,
    matrices: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    captured: tl.tensor,
    out: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    inputs_stride: tl.tensor,
    matrices_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
    has_bias: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    keys: tl.constexpr = key_heads * key_dim
    channels: tl.constexpr = 2 * keys + value_heads * value_dim
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    key_head = _key_head(head, key_heads, value_heads, tiled)
    key, value = tl.arange(0, key_block), tl.arange(0, value_block)
    is_key, is_value = key < key_dim, value < value_dim
    # Queries and keys are one tile, which is more than a thread each: less, and Triton would load all of it again for
    # each layout that it is wanted in.
    kind = tl.arange(0, 2)[:, None]
    qk_channel = kind * keys + key_head * key_dim + key[None, :]
    is_qk = is_key[None, :]
    v_channel = 2 * keys + head * value_dim + value
    to = out + row * out_stride + head * value_dim + value
    scale = tl.load(norm + value, mask=is_value, other=0.0)
    if pdl:
        gdc_launch_dependents()
    # All that comes from earlier steps, and what says where, is there before the kernel ahead has ended: every step
    # begins with one that waits for all before it.
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        if pdl:
            gdc_wait()
        tl.store(to, tl.zeros([value_block], out.dtype.element_ty), mask=is_value)
    else:
        position = tl.load(positions + row)
        also = tl.load(captured + row).to(tl.int64)
        ring, x = inputs + slot * inputs_stride, mixed + row * mixed_stride
        place = head * (key_dim * value_dim) + key[:, None] * value_dim + value[None, :]
        there = is_key[:, None] & is_value[None, :]
        # First, so that it is on the way while the rest is computed.
        s = tl.load(matrices + slot * matrices_stride + place, mask=there & (position > 0), other=0.0)
        qk_before = _convolved_before(ring, filters, qk_channel, is_qk, position, channels, taps)
        v_before = _convolved_before(ring, filters, v_channel, is_value, position, channels, taps)
        if pdl:
            gdc_wait()
        qk, qk_input = _convolved(x, qk_before, filters, bias, qk_channel, is_qk, channels, taps, has_bias)
        v, v_input = _convolved(x, v_before, filters, bias, v_channel, is_value, channels, taps, has_bias)
        z = tl.load(x + channels + head * value_dim + value, mask=is_value, other=0.0).to(tl.float32)
        kept, strength = _gates(gates + row * gates_stride + head, decay + head, decay_bias + head, value_heads)

        qk = _unit(qk, 1)
        q = tl.sum(tl.where(kind == 0, qk, 0.0), 0) * (key_dim**-0.5)
        k = tl.sum(tl.where(kind == 1, qk, 0.0), 0)
        predicted = tl.sum(s * k[:, None], 0)
        seen = tl.sum(s * q[:, None], 0)
        written = strength * (v - kept * predicted)
        s = kept * s + k[:, None] * written[None, :]
        tl.store(matrices + slot * matrices_stride + place, s, mask=there)
        if also >= 0:
            tl.store(matrices + also * matrices_stride + place, s, mask=there)
        seen = kept * seen + tl.sum(q * k, 0) * written
        seen *= tl.rsqrt(tl.sum(seen * seen, 0) / value_dim + eps) * scale * _silu(z)
        tl.store(to, seen.to(out.dtype.element_ty), mask=is_value)

        reads_first = is_qk & _is_first_reader(head, key_heads, value_heads, tiled)
        now = ring + (position % taps) * channels
        tl.store(now + qk_channel, qk_input, mask=reads_first)
        tl.store(now + v_channel, v_input, mask=is_value)
        if also >= 0:
            copied = inputs + also * inputs_stride
            _keep(copied, x, ring, qk_channel, reads_first, position, 1, mixed_stride, channels, taps)
            _keep(copied, x, ring, v_channel, is_value, position, 1, mixed_stride, channels, taps)


@triton.jit
def _key_head(head: tl.tensor, key_heads: tl.constexpr, value_heads: tl.constexpr, tiled: tl.constexpr) -> tl.tensor:
    if tiled:
        return head % key_heads
    return head // (value_heads // key_heads)


@triton.jit
def _is_first_reader(
    head: tl.tensor, key_heads: tl.constexpr, value_heads: tl.constexpr, tiled: tl.constexpr
) -> tl.tensor:
    """Whether no lower value head reads the same key head."""
    if tiled:
        return head < key_heads
    return head % (value_heads // key_heads) == 0


@triton.jit
def _silu(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _unit(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, axis) + _QK_EPS), axis)


@triton.jit
def _log1p_exp(x: tl.tensor) -> tl.tensor:
    """The series for small exp(x), for a sum with 1 would lose most of it."""
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.0625, series, tl.log(1.0 + e)))


@triton.jit
def _gates(
    of_row: tl.tensor, decay: tl.tensor, decay_bias: tl.tensor, value_heads: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The share of the state that is kept, and the strength of what is written."""
    b = tl.load(of_row).to(tl.float32)
    a = tl.load(of_row + value_heads).to(tl.float32) + tl.load(decay_bias)
    return tl.exp(-tl.exp(tl.load(decay)) * _log1p_exp(a)), 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def _convolved_before(
    ring: tl.tensor,
    filters: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    position: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
) -> tl.tensor:
    """What earlier inputs contribute to one row's channels."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(taps - 1):
        at = position - (taps - 1 - tap)
        kept = tl.load(ring + (at % taps) * channels + channel, mask=inside & (at >= 0), other=0.0)
        total += tl.load(filters + tap * channels + channel, mask=inside, other=0.0) * kept.to(tl.float32)
    return total


@triton.jit
def _convolved(
    x: tl.tensor,
    total: tl.tensor,
    filters: tl.tensor,
    bias: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """One row's channels, of which `total` comes from earlier inputs: convolved, after silu, and as they are."""
    newest = tl.load(x + channel, mask=inside, other=0.0)
    total += tl.load(filters + (taps - 1) * channels + channel, mask=inside, other=0.0) * newest.to(tl.float32)
    if has_bias:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    return _silu(total), newest


@triton.jit
def _keep(
    to: tl.tensor,
    x: tl.tensor,
    ring: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    position: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
) -> None:
    """Writes the latest inputs to a ring: of `rows` rows from x on, the first of which is at `position`, and before
    that of another ring, or of the same, which has them already.
    """
    for back in tl.static_range(taps):
        offset = rows - 1 - back
        at = position + offset
        if offset >= 0:
            value = tl.load(x + offset * row_stride + channel, mask=inside, other=0.0)
            tl.store(to + (at % taps) * channels + channel, value, mask=inside)
        elif at >= 0:
            value = tl.load(ring + (at % taps) * channels + channel, mask=inside, other=0.0)
            tl.store(to + (at % taps) * channels + channel, value, mask=inside)


@triton.jit
def _keep_of_head(
    to: tl.tensor,
    x: tl.tensor,
    ring: tl.tensor,
    head: tl.tensor,
    position: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
) -> None:
    """The same for the channels of a value head, and for those of its key head if no lower value head reads that."""
    keys: tl.constexpr = key_heads * key_dim
    channels: tl.constexpr = 2 * keys + value_heads * value_dim
    value = tl.arange(0, value_block)
    _keep(
        to, x, ring, 2 * keys + head * value_dim + value, value < value_dim, position, rows, row_stride, channels, taps
    )  # fmt: skip
    if _is_first_reader(head, key_heads, value_heads, tiled):
        key = tl.arange(0, key_block)
        q_channel = _key_head(head, key_heads, value_heads, tiled) * key_dim + key
        _keep(to, x, ring, q_channel, key < key_dim, position, rows, row_stride, channels, taps)
        _keep(to, x, ring, keys + q_channel, key < key_dim, position, rows, row_stride, channels, taps)


@triton.jit
def _piece(
    pieces: tl.tensor, chunks: tl.tensor, number: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The first row of a piece, its rows, which are none if nobody uses it, its chunk, and whether it is used."""
    own = pieces + number * _PIECE_FIELDS
    chunk = chunks + tl.load(own + 3) * _CHUNK_FIELDS
    used = (tl.load(chunk) >= 0) & (number >= tl.load(chunk + 2)) & (number < tl.load(chunk + 3))
    return tl.load(own).to(tl.int64), tl.where(used, tl.load(own + 1), 0), chunk, used


@triton.jit(do_not_specialize=["chunks", "pieces"])
def _prepare_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    filters: tl.tensor,
    bias: tl.tensor,
    decay: tl.tensor,
    decay_bias: tl.tensor,
    inputs: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    prepared: tl.tensor,
    factors: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    inputs_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
    has_bias: tl.constexpr,
    rows_block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A piece's rows of one head: q and k of a key head, or v and the gates of a value head.

    prepared [rows, …], as [q | k | v]; factors [rows, …], as [kept | strength | q k]
    """
    keys: tl.constexpr = key_heads * key_dim
    channels: tl.constexpr = 2 * keys + value_heads * value_dim
    factor_count: tl.constexpr = 2 * value_heads + key_heads
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    first, rows, chunk, _ = _piece(pieces, chunks, tl.program_id(1))
    if rows > 0:
        before = tl.load(pieces + tl.load(chunk + 2) * _PIECE_FIELDS)
        ring = inputs + tl.load(chunk).to(tl.int64) * inputs_stride
        position = tl.load(chunk + 1)
        # The row's number in its chunk.
        skipped = (first - before).to(tl.int32)
        # What both branches name must have the same shape.
        if tl.program_id(0) < key_heads:
            key_head = tl.program_id(0)
            key = tl.arange(0, key_block)
            q_channel, is_key = key_head * key_dim + key, key < key_dim
            for start in range(0, rows, rows_block):
                number = start + tl.arange(0, rows_block)
                row = first + number
                x = mixed + row * mixed_stride
                mask = (number < rows)[:, None] & is_key[None, :]
                offset = skipped + number
                q = _convolved_rows(
                    x, mixed_stride, ring, filters, bias, q_channel, is_key, mask, offset, position, channels, taps,
                    has_bias,
                )  # fmt: skip
                k = _convolved_rows(
                    x, mixed_stride, ring, filters, bias, keys + q_channel, is_key, mask, offset, position, channels,
                    taps, has_bias,
                )  # fmt: skip
                q = _unit(q, 1) * (key_dim**-0.5)
                k = _unit(k, 1)
                to = prepared + (row * channels)[:, None] + q_channel[None, :]
                tl.store(to, q, mask=mask)
                tl.store(to + keys, k, mask=mask)
                tl.store(
                    factors + row * factor_count + 2 * value_heads + key_head, tl.sum(q * k, 1), mask=number < rows
                )
        else:
            head = tl.program_id(0) - key_heads
            value = tl.arange(0, value_block)
            v_channel, is_value = 2 * keys + head * value_dim + value, value < value_dim
            speed, shift = tl.exp(tl.load(decay + head)), tl.load(decay_bias + head)
            for start in range(0, rows, rows_block):
                number = start + tl.arange(0, rows_block)
                row = first + number
                mask = (number < rows)[:, None] & is_value[None, :]
                v = _convolved_rows(
                    mixed + row * mixed_stride, mixed_stride, ring, filters, bias, v_channel, is_value, mask,
                    skipped + number, position, channels, taps, has_bias,
                )  # fmt: skip
                tl.store(prepared + (row * channels)[:, None] + v_channel[None, :], v, mask=mask)
                of_row = gates + row * gates_stride + head
                b = tl.load(of_row, mask=number < rows, other=0.0).to(tl.float32)
                a = tl.load(of_row + value_heads, mask=number < rows, other=0.0).to(tl.float32) + shift
                to = factors + row * factor_count + head
                tl.store(to, tl.exp(-speed * _log1p_exp(a)), mask=number < rows)
                tl.store(to + value_heads, 1.0 / (1.0 + tl.exp(-b)), mask=number < rows)


@triton.jit
def _convolved_rows(
    x: tl.tensor,
    row_stride: tl.tensor,
    ring: tl.tensor,
    filters: tl.tensor,
    bias: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    mask: tl.tensor,
    offset: tl.tensor,
    position: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
) -> tl.tensor:
    """Rows of a chunk, which have these numbers in it: convolved, after silu."""
    total = tl.zeros([offset.shape[0], channel.shape[0]], tl.float32)
    for tap in tl.static_range(taps):
        back = taps - 1 - tap
        known = offset >= back
        at = position + offset - back
        new = tl.load((x - back * row_stride)[:, None] + channel[None, :], mask=mask & known[:, None], other=0.0)
        value = new.to(tl.float32)
        if back > 0:
            old = (~known & (at >= 0))[:, None] & mask
            kept = tl.load(ring + ((at % taps) * channels)[:, None] + channel[None, :], mask=old, other=0.0)
            value += kept.to(tl.float32)
        total += tl.load(filters + tap * channels + channel, mask=inside, other=0.0)[None, :] * value
    if has_bias:
        total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    return _silu(total)


@triton.jit(do_not_specialize=["chunks", "pieces", "column_stride"])
def _scan_kernel(
    mixed: tl.tensor,
    inputs: tl.tensor,
    matrices: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    prepared: tl.tensor,
    factors: tl.tensor,
    mixed_stride: tl.tensor,
    inputs_stride: tl.tensor,
    matrices_stride: tl.tensor,
    column_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
    row_lanes: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Takes some columns of a head's matrix through a chunk, row by row.

    Triton gives a tile's last dimensions to lanes, those before them to warps, and the first ones to registers. So a
    matrix's part has five: the numbers of its rows have three, and those of its columns two.

        row = [ high | lane | low ]      column = [ group | lane ]      tile = [high, low, group, row lane, column lane]

    The stride of columns is 1, which is not told, lest Triton choose another order of the tile for wider loads.
    """
    keys: tl.constexpr = key_heads * key_dim
    channels: tl.constexpr = 2 * keys + value_heads * value_dim
    factor_count: tl.constexpr = 2 * value_heads + key_heads
    low_count: tl.constexpr = 4
    high_count: tl.constexpr = key_block // (low_count * row_lanes)
    column_lanes: tl.constexpr = 32 // row_lanes
    head = tl.program_id(1)
    key_head = _key_head(head, key_heads, value_heads, tiled)
    high = tl.arange(0, high_count)[:, None, None]
    low = tl.arange(0, low_count)[None, :, None]
    key = high * (low_count * row_lanes) + tl.arange(0, row_lanes)[None, None, :] * low_count + low
    group, lane = tl.arange(0, columns // column_lanes)[:, None], tl.arange(0, column_lanes)[None, :]
    value = tl.program_id(0) * columns + group * column_lanes + lane
    is_key, is_value = key < key_dim, value < value_dim
    place = head * (key_dim * value_dim) + (key * value_dim)[:, :, None, :, None]
    place += (value * column_stride)[None, None, :, None, :]
    there = is_key[:, :, None, :, None] & is_value[None, None, :, None, :]
    # Results are stored from where they are: one of the lanes that share a column stores.
    row_lane = tl.arange(0, row_lanes)[None, :, None]
    writes = (row_lane == 0) & is_value[:, None, :]
    if pdl:
        gdc_launch_dependents()
        gdc_wait()

    chunk = chunks + tl.program_id(2) * _CHUNK_FIELDS
    slot, position = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    if slot >= 0:
        first_piece, end_piece = tl.load(chunk + 2), tl.load(chunk + 3)
        before = tl.load(pieces + first_piece * _PIECE_FIELDS).to(tl.int64)
        s = tl.load(matrices + slot * matrices_stride + place, mask=there & (position > 0), other=0.0)
        for piece in range(first_piece, end_piece):
            first = tl.load(pieces + piece * _PIECE_FIELDS).to(tl.int64)
            rows = tl.load(pieces + piece * _PIECE_FIELDS + 1)
            kept_slot = tl.load(pieces + piece * _PIECE_FIELDS + 2).to(tl.int64)
            of_row = prepared + first * channels
            factor = factors + first * factor_count
            for _ in tl.range(0, rows, num_stages=stages):
                q = tl.load(of_row + key_head * key_dim + key, mask=is_key, other=0.0)
                k = tl.load(of_row + keys + key_head * key_dim + key, mask=is_key, other=0.0)
                at_value = of_row + 2 * keys + head * value_dim + value * column_stride
                v = tl.load(at_value, mask=is_value, other=0.0)
                kept, strength = tl.load(factor + head), tl.load(factor + value_heads + head)
                likeness = tl.load(factor + 2 * value_heads + key_head)
                k_tile = k[:, :, None, :, None]
                predicted = tl.sum(tl.sum(tl.sum(s * k_tile, 0), 0), 1)
                seen = tl.sum(tl.sum(tl.sum(s * q[:, :, None, :, None], 0), 0), 1)
                written = strength * (v - kept * predicted)
                s = kept * s + k_tile * written[None, None, :, None, :]
                result = kept * seen + likeness * written
                tl.store(at_value[:, None, :] + row_lane * 0, result[:, None, :] + row_lane * 0.0, mask=writes)
                of_row += channels
                factor += factor_count
            if kept_slot >= 0:
                tl.store(matrices + kept_slot * matrices_stride + place, s, mask=there)
                if tl.program_id(0) == 0:
                    _keep_of_head(
                        inputs + kept_slot * inputs_stride, mixed + before * mixed_stride,
                        inputs + slot * inputs_stride, head, position, first - before + rows, mixed_stride, key_heads,
                        value_heads, key_dim, value_dim, key_block, value_block, taps, tiled,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "pieces"])
def _finish_kernel(
    mixed: tl.tensor,
    norm: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    prepared: tl.tensor,
    out: tl.tensor,
    mixed_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
    has_bias: tl.constexpr,
    rows_block: tl.constexpr,
    blocks: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A piece's rows of one value head. Blocks are [pieces, value heads, rows, columns]."""
    keys: tl.constexpr = key_heads * key_dim
    channels: tl.constexpr = 2 * keys + value_heads * value_dim
    part = tl.arange(0, value_block)
    inside = part < value_dim
    scale = tl.load(norm + part, mask=inside, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    first, rows, _, _ = _piece(pieces, chunks, tl.program_id(1))
    column = tl.program_id(0) * value_dim + part
    for start in range(0, rows, rows_block):
        number = start + tl.arange(0, rows_block)
        row = first + number
        mask = (number < rows)[:, None] & inside[None, :]
        if blocks:
            of_row = ((tl.program_id(1) * value_heads + tl.program_id(0)).to(tl.int64) * _BLOCK + number) * value_block
            seen = tl.load(prepared + of_row[:, None] + part[None, :], mask=mask, other=0.0)
        else:
            seen = tl.load(prepared + (row * channels)[:, None] + 2 * keys + column[None, :], mask=mask, other=0.0)
        z = tl.load(mixed + (row * mixed_stride)[:, None] + channels + column[None, :], mask=mask, other=0.0)
        factor = tl.rsqrt(tl.sum(seen * seen, 1) / value_dim + eps)
        seen = seen * factor[:, None] * scale[None, :] * _silu(z.to(tl.float32))
        tl.store(out + (row * out_stride)[:, None] + column[None, :], seen.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """As precise as the operands are."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    return tl.dot(a, b)


@triton.jit
def _inverse(a: tl.tensor) -> tl.tensor:
    """The inverse of I + a, where `a` has nothing on and above the diagonal.

    By substitution in parts of 16 rows, all at once. Two neighbours then make one: of [P 0; A Q] the lower left of the
    inverse is -Q⁻¹ A P⁻¹.
    """
    parts: tl.constexpr = _BLOCK // 16
    own = tl.arange(0, parts)[:, None, None, None] == tl.arange(0, parts)[None, None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(a, [parts, 16, parts, 16]), 0.0), 2)
    at, across = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    x = tl.where(at == across, 1.0, 0.0) + tl.zeros([parts, 16, 16], tl.float32)
    for step in range(15):
        below = tl.sum(tl.where(across == step, diagonal, 0.0), 2)
        done = tl.sum(tl.where(at == step, x, 0.0), 1)
        x -= below[:, :, None] * done[:, None, :]
    x = tl.reshape(tl.where(own, x[:, :, None, :], 0.0), [_BLOCK, _BLOCK])
    return _joined(_joined(x, a, 16), a, 32)


@triton.jit
def _joined(inverse: tl.tensor, a: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Inverses of parts of so many rows become those of parts of twice as many."""
    row, column = tl.arange(0, _BLOCK)[:, None] // size, tl.arange(0, _BLOCK)[None, :] // size
    left = tl.where((row // 2 == column // 2) & (row != column), a, 0.0)
    return inverse - _product(_product(inverse, left), inverse)


@triton.jit(do_not_specialize=["chunks", "pieces"])
def _blocks_kernel(
    mixed: tl.tensor,
    gates: tl.tensor,
    filters: tl.tensor,
    bias: tl.tensor,
    decay: tl.tensor,
    decay_bias: tl.tensor,
    inputs: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    w_out: tl.tensor,
    likeness: tl.tensor,
    u_out: tl.tensor,
    kept: tl.tensor,
    mixed_stride: tl.tensor,
    gates_stride: tl.tensor,
    inputs_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
    has_bias: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A piece and value head: all that does not depend on the state. Rows that the piece lacks are zeros, which change
    nothing, and so are a head's columns up to the tile's width.
    """
    keys: tl.constexpr = key_heads * key_dim
    channels: tl.constexpr = 2 * keys + value_heads * value_dim
    dtype = q_out.dtype.element_ty
    head = tl.program_id(0)
    key_head = _key_head(head, key_heads, value_heads, tiled)
    key, value = tl.arange(0, key_block), tl.arange(0, value_block)
    is_key, is_value = key < key_dim, value < value_dim
    q_channel, v_channel = key_head * key_dim + key, 2 * keys + head * value_dim + value
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    first, rows, chunk, used = _piece(pieces, chunks, tl.program_id(1))
    if used:
        own = (tl.program_id(1) * value_heads + head).to(tl.int64)
        before = tl.load(pieces + tl.load(chunk + 2) * _PIECE_FIELDS)
        ring, position = inputs + tl.load(chunk).to(tl.int64) * inputs_stride, tl.load(chunk + 1)
        skipped = (first - before).to(tl.int32)
        at_key, at_value = own * (_BLOCK * key_block), own * (_BLOCK * value_block)
        # A few rows at a time, by way of memory: all at once are more than registers hold.
        for start in range(0, _BLOCK, _CONVOLVED):
            number = start + tl.arange(0, _CONVOLVED)
            there = number < rows
            x, offset = mixed + (first + number) * mixed_stride, skipped + number
            is_q, is_v = there[:, None] & is_key[None, :], there[:, None] & is_value[None, :]
            at_k = at_key + number[:, None] * key_block + key[None, :]
            k = _convolved_rows(
                x, mixed_stride, ring, filters, bias, keys + q_channel, is_key, is_q, offset, position, channels, taps,
                has_bias,
            )  # fmt: skip
            tl.store(k_out + at_k, _unit(tl.where(is_q, k, 0.0), 1).to(dtype))
            q = _convolved_rows(
                x, mixed_stride, ring, filters, bias, q_channel, is_key, is_q, offset, position, channels, taps,
                has_bias,
            )  # fmt: skip
            tl.store(q_out + at_k, (_unit(tl.where(is_q, q, 0.0), 1) * (key_dim**-0.5)).to(dtype))
            v = _convolved_rows(
                x, mixed_stride, ring, filters, bias, v_channel, is_value, is_v, offset, position, channels, taps,
                has_bias,
            )  # fmt: skip
            tl.store(u_out + at_value + number[:, None] * value_block + value[None, :], tl.where(is_v, v, 0.0))
        tl.debug_barrier()
        row = tl.arange(0, _BLOCK)
        of_row = gates + (first + row) * gates_stride + head
        b = tl.load(of_row, mask=row < rows, other=0.0).to(tl.float32)
        a = tl.load(of_row + value_heads, mask=row < rows, other=0.0).to(tl.float32) + tl.load(decay_bias + head)
        strength = tl.where(row < rows, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        g = tl.where(row < rows, -tl.exp(tl.load(decay + head)) * _log1p_exp(a), 0.0)
        # Sums of their own for each pair of rows: differences of sums would lose what follows a large one.
        between = tl.where(row[:, None] > row[None, :], g[:, None], 0.0)
        left = tl.where(row[:, None] >= row[None, :], tl.exp(tl.cumsum(between, 0)), 0.0)
        since, until = tl.exp(tl.cumsum(g, 0)), tl.exp(tl.sum(between, 0))
        tl.store(kept + own, tl.exp(tl.sum(g, 0)))

        at_key += row[:, None] * key_block + key[None, :]
        k = tl.load(k_out + at_key)
        q = tl.load(q_out + at_key)
        tl.debug_barrier()
        k_wide = k.to(tl.float32)
        tl.store(k_out + at_key, (k_wide * until[:, None]).to(dtype))
        tl.store(q_out + at_key, (q.to(tl.float32) * since[:, None]).to(dtype))
        seen = (_product(q, tl.trans(k)) * left).to(dtype)
        tl.store(likeness + own * (_BLOCK * _BLOCK) + row[:, None] * _BLOCK + row[None, :], seen)
        alike = _product(k, tl.trans(k)) * left * strength[:, None]
        t = _inverse(tl.where(row[:, None] > row[None, :], alike, 0.0)).to(dtype)
        w = _product(t, (k_wide * (strength * since)[:, None]).to(dtype))
        tl.store(w_out + at_key, (-w).to(dtype))
        at_value += row[:, None] * value_block + value[None, :]
        u = _product(t, (tl.load(u_out + at_value) * strength[:, None]).to(dtype))
        tl.debug_barrier()
        tl.store(u_out + at_value, u)


@triton.jit(do_not_specialize=["chunks", "pieces"])
def _blocks_scan_kernel(
    mixed: tl.tensor,
    inputs: tl.tensor,
    matrices: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    q_in: tl.tensor,
    k_in: tl.tensor,
    w_in: tl.tensor,
    likeness: tl.tensor,
    u_in: tl.tensor,
    kept: tl.tensor,
    mixed_stride: tl.tensor,
    inputs_stride: tl.tensor,
    matrices_stride: tl.tensor,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    taps: tl.constexpr,
    tiled: tl.constexpr,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Takes some columns of a head's matrix through a chunk, block by block. What is seen replaces u.

    All is transposed: then the state and u are first operands, which tensor cores take from registers.
    """
    head = tl.program_id(1)
    number = tl.arange(0, _BLOCK)
    key, value = tl.arange(0, key_block), tl.program_id(0) * columns + tl.arange(0, columns)
    place = head * (key_dim * value_dim) + key[None, :] * value_dim + value[:, None]
    there = (key < key_dim)[None, :] & (value < value_dim)[:, None]
    at_key = number[:, None] * key_block + key[None, :]
    at_value = number[None, :] * value_block + value[:, None]
    at_row = number[:, None] * _BLOCK + number[None, :]
    if pdl:
        gdc_launch_dependents()
        gdc_wait()

    chunk = chunks + tl.program_id(2) * _CHUNK_FIELDS
    slot, position = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    if slot >= 0:
        first_piece, end_piece = tl.load(chunk + 2), tl.load(chunk + 3)
        before = tl.load(pieces + first_piece * _PIECE_FIELDS).to(tl.int64)
        s = tl.load(matrices + slot * matrices_stride + place, mask=there & (position > 0), other=0.0)
        for piece in tl.range(first_piece, end_piece, num_stages=stages):
            own = (piece * value_heads + head).to(tl.int64)
            w = tl.trans(tl.load(w_in + own * (_BLOCK * key_block) + at_key))
            q = tl.trans(tl.load(q_in + own * (_BLOCK * key_block) + at_key))
            k = tl.load(k_in + own * (_BLOCK * key_block) + at_key)
            seen = tl.trans(tl.load(likeness + own * (_BLOCK * _BLOCK) + at_row))
            at_u = u_in + own * (_BLOCK * value_block) + at_value
            u = tl.load(at_u)
            if k.dtype == tl.float32:
                u = tl.dot(s, w, u, input_precision="tf32x3")
                result = tl.dot(s, q, input_precision="tf32x3")
                result = tl.dot(u, seen, result, input_precision="tf32x3")
                s = tl.dot(u, k, s * tl.load(kept + own), input_precision="tf32x3")
            else:
                high = s.to(k.dtype)
                low = (s - high.to(tl.float32)).to(k.dtype)
                u = tl.dot(low, w, tl.dot(high, w, u))
                result = tl.dot(low, q, tl.dot(high, q))
                written = u.to(k.dtype)
                s = tl.dot(written, k, s * tl.load(kept + own))
                result = tl.dot(written, seen, result)
            tl.store(at_u, result)
            kept_slot = tl.load(pieces + piece * _PIECE_FIELDS + 2).to(tl.int64)
            if kept_slot >= 0:
                tl.store(matrices + kept_slot * matrices_stride + place, s, mask=there)
                if tl.program_id(0) == 0:
                    known = tl.load(pieces + piece * _PIECE_FIELDS) - before
                    known += tl.load(pieces + piece * _PIECE_FIELDS + 1)
                    _keep_of_head(
                        inputs + kept_slot * inputs_stride, mixed + before * mixed_stride,
                        inputs + slot * inputs_stride, head, position, known, mixed_stride, key_heads, value_heads,
                        key_dim, value_dim, key_block, value_block, taps, tiled,
                    )  # fmt: skip

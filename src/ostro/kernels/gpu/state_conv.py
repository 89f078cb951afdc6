"""Causal convolutions of rows whose sequences keep their latest inputs, `state_rows`:

    chunk     x[4] x[5] x[6] x[7]        ring of its slot     [ x[0] | x[1] | x[2] | x[3] ]
    row 5     w0 x[2] + w1 x[3] + w2 x[4] + w3 x[5] + bias

A row's terms are added from the oldest on, so that its bits do not depend on where chunks are cut. Chunks are convolved
by one kernel, and another then keeps their inputs: in the slots that take a state behind some of their rows, the
chunk's own last.

Knows which rows are a chunk's, and LFM2's gates around a convolution; knows no matrices. The plain twins are
`torch_models.recurrent.Convolution` and `ShortConvolution`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu import state_rows as tables_of
from ostro.kernels.gpu.state_rows import ChunkTables, SingleRows

_SLOT, _POSITION = tl.constexpr(tables_of.SLOT), tl.constexpr(tables_of.POSITION)
_FIRST_PIECE, _END_PIECE = tl.constexpr(tables_of.FIRST_PIECE), tl.constexpr(tables_of.END_PIECE)
_CHUNK_FIELDS = tl.constexpr(tables_of.CHUNK_FIELDS)
_FIRST_ROW, _ROWS = tl.constexpr(tables_of.FIRST_ROW), tl.constexpr(tables_of.ROWS)
_KEPT, _CHUNK = tl.constexpr(tables_of.KEPT), tl.constexpr(tables_of.CHUNK)
_PIECE_FIELDS = tl.constexpr(tables_of.PIECE_FIELDS)

# Rows of a piece that a program convolves at a time, and its channels.
_TILE_ROWS, _TILE_CHANNELS = 16, 128
# Channels of a program for single rows, and for keeping inputs.
_BLOCK = 256


def convolve_chunks(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    tables: ChunkTables,
    *,
    silu: bool,
    pdl: bool = False,
) -> Tensor:
    """Convolves the chunks' rows of x [rows, channels], each row contiguous, and applies silu if asked to. `taps` are
    float32 [taps, channels], oldest first; `inputs` are those kept. The result is float32 [rows, channels], undefined
    for rows of no chunk.

    Keep the inputs afterwards: what follows a chunk's last row is not kept by this.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _convolve(x, taps, bias, inputs, tables, out, silu=silu, gated=False, pdl=pdl)
    return out


def keep_inputs(x: Tensor, inputs: Tensor, tables: ChunkTables, *, pdl: bool = False) -> None:
    """Keeps the chunks' inputs x, which have been convolved, in all slots that take a state."""
    _keep(x, inputs, tables, gated=False, pdl=pdl)


def convolve_singles(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: SingleRows,
    *,
    silu: bool,
    pdl: bool = False,
) -> Tensor:
    """The same for rows that are their sequences' only ones, whose inputs are kept, too. Zeros for rows without a slot.

    The next kernel begins when this one no longer waits: what was there before, it may read at once.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _convolve_singles(x, taps, bias, inputs, rows, out, silu=silu, gated=False, pdl=pdl)
    return out


def short_singles(
    bcu: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: SingleRows,
    out: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """For each row [b | c | u] the convolution of b * u, times c; the inputs are kept. `out` is [rows, channels] in the
    model's number format, zero for rows without a slot.
    """
    _convolve_singles(bcu, taps, bias, inputs, rows, out, silu=False, gated=True, pdl=pdl)


def short_chunks(
    bcu: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    tables: ChunkTables,
    out: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """The same for chunks; `out` is left alone for rows of none. A row has the same bits as a single one."""
    _convolve(bcu, taps, bias, inputs, tables, out, silu=False, gated=True, pdl=pdl)
    _keep(bcu, inputs, tables, gated=True, pdl=pdl)


def _check(x: Tensor, taps: Tensor, inputs: Tensor, *, gated: bool) -> int:
    """The number of channels."""
    number, channels = taps.shape
    assert taps.dtype == torch.float32
    assert taps.is_contiguous()
    assert x.shape[1] == channels * (3 if gated else 1)
    assert x.stride(1) == 1
    assert inputs.dtype == x.dtype
    assert inputs.shape[1:] == (number, channels)
    assert inputs.stride()[1:] == (channels, 1)
    return channels


def _convolve_singles(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: SingleRows,
    out: Tensor,
    *,
    silu: bool,
    gated: bool,
    pdl: bool,
) -> None:
    channels = _check(x, taps, inputs, gated=gated)
    assert out.shape == (len(x), channels)
    assert out.stride(1) == 1
    _singles_kernel[(len(x), triton.cdiv(channels, _BLOCK))](
        x,
        taps,
        taps if bias is None else bias,
        inputs,
        *rows,
        out,
        x.stride(0),
        inputs.stride(0),
        out.stride(0),
        channels=channels,
        taps=len(taps),
        has_bias=bias is not None,
        silu=silu,
        gated=gated,
        block=_BLOCK,
        pdl=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


def _convolve(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    tables: ChunkTables,
    out: Tensor,
    *,
    silu: bool,
    gated: bool,
    pdl: bool,
) -> None:
    channels = _check(x, taps, inputs, gated=gated)
    assert out.shape == (len(x), channels)
    assert out.stride(1) == 1
    _convolve_kernel[(len(tables.pieces), triton.cdiv(channels, _TILE_CHANNELS))](
        x,
        taps,
        taps if bias is None else bias,
        inputs,
        *tables,
        out,
        len(tables.chunks),
        x.stride(0),
        inputs.stride(0),
        out.stride(0),
        channels=channels,
        taps=len(taps),
        has_bias=bias is not None,
        silu=silu,
        gated=gated,
        rows=_TILE_ROWS,
        block=_TILE_CHANNELS,
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _keep(x: Tensor, inputs: Tensor, tables: ChunkTables, *, gated: bool, pdl: bool) -> None:
    taps, channels = inputs.shape[1:]
    _keep_kernel[(len(tables.pieces), triton.cdiv(channels, _BLOCK))](
        x,
        inputs,
        *tables,
        len(tables.chunks),
        x.stride(0),
        inputs.stride(0),
        channels=channels,
        taps=taps,
        gated=gated,
        block=_BLOCK,
        pdl=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )


@triton.jit
def piece_at(
    chunks: tl.tensor, pieces: tl.tensor, number: tl.tensor, num_chunks: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A piece's chunk: its slot, position, first row, first piece and end. The slot is -1 if no chunk has the piece,
    which may then hold anything.
    """
    chunk = tl.load(pieces + number * _PIECE_FIELDS + _CHUNK)
    listed = (chunk >= 0) & (chunk < num_chunks)
    fields = chunks + chunk * _CHUNK_FIELDS
    slot = tl.load(fields + _SLOT, mask=listed, other=-1)
    position = tl.load(fields + _POSITION, mask=listed, other=0)
    first = tl.load(fields + _FIRST_PIECE, mask=listed, other=0)
    end = tl.load(fields + _END_PIECE, mask=listed, other=0)
    used = (slot >= 0) & (first <= number) & (number < end)
    first_row = tl.load(pieces + first * _PIECE_FIELDS + _FIRST_ROW, mask=used, other=0)
    return tl.where(used, slot, -1), position, first_row, first, end


@triton.jit
def silu_of(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _input(
    x: tl.tensor, row: tl.tensor, channel: tl.tensor, there: tl.tensor, channels: tl.constexpr, gated: tl.constexpr
) -> tl.tensor:
    """What is convolved of rows, in the model's number format; `row` points."""
    value = tl.load(x + row + channel, mask=there, other=0.0)
    if gated:
        other = tl.load(x + row + 2 * channels + channel, mask=there, other=0.0)
        value = (value.to(tl.float32) * other.to(tl.float32)).to(value.dtype)
    return value


@triton.jit(do_not_specialize=["num_chunks"])
def _convolve_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    inputs: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    out: tl.tensor,
    num_chunks: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    gated: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)[None, :]
    wanted = channel < channels
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    slot, position, chunk_row, _, _ = piece_at(chunks, pieces, number, num_chunks)
    if slot < 0:
        return
    ring = inputs + slot.to(tl.int64) * slot_stride
    first = tl.load(pieces + number * _PIECE_FIELDS + _FIRST_ROW)
    count = tl.load(pieces + number * _PIECE_FIELDS + _ROWS)
    for start in range(0, count, rows):
        of_piece = start + tl.arange(0, rows)[:, None]
        row = (first + of_piece).to(tl.int64)
        inside = (of_piece < count) & wanted
        of_chunk = first - chunk_row + of_piece
        total = tl.zeros([rows, block], tl.float32)
        for tap in tl.static_range(taps):
            back = taps - 1 - tap
            since = of_chunk - back
            value = _input(x, (row - back) * x_stride, channel, inside & (since >= 0), channels, gated)
            if back > 0:
                before = position + since
                kept = ring + (before % taps) * channels + channel
                older = tl.load(kept, mask=inside & (since < 0) & (before >= 0), other=0.0)
                value = tl.where(since >= 0, value, older)
            scale = tl.load(weight + tap * channels + channel, mask=wanted, other=0.0)
            total = tl.fma(tl.broadcast_to(scale, [rows, block]), value.to(tl.float32), total)
        if has_bias:
            total += tl.load(bias + channel, mask=wanted, other=0.0)
        if silu:
            total = silu_of(total)
        if gated:
            gate = tl.load(x + row * x_stride + channels + channel, mask=inside, other=0.0)
            total = total.to(gate.dtype).to(tl.float32) * gate.to(tl.float32)
        tl.store(out + row * out_stride + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_chunks"])
def _keep_kernel(
    x: tl.tensor,
    inputs: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    num_chunks: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    slot, position, chunk_row, first_piece, end_piece = piece_at(chunks, pieces, number, num_chunks)
    if slot < 0:
        return
    if number + 1 == end_piece:
        # Slots behind fewer rows take older inputs from the ring that changes below.
        early = first_piece
        while (early < number) & (_end_of(pieces, early, chunk_row) < taps - 1):
            _keep_piece(
                x,
                inputs,
                pieces,
                early,
                chunk_row,
                slot,
                position,
                channel,
                x_stride,
                slot_stride,
                channels,
                taps,
                gated,
            )
            early += 1
        tl.debug_barrier()
        _keep_piece(
            x, inputs, pieces, number, chunk_row, slot, position, channel, x_stride, slot_stride, channels, taps, gated
        )
    elif _end_of(pieces, number, chunk_row) >= taps - 1:
        _keep_piece(
            x, inputs, pieces, number, chunk_row, slot, position, channel, x_stride, slot_stride, channels, taps, gated
        )


@triton.jit
def _end_of(pieces: tl.tensor, piece: tl.tensor, chunk_row: tl.tensor) -> tl.tensor:
    """The chunk's rows up to the end of a piece."""
    fields = pieces + piece * _PIECE_FIELDS
    return tl.load(fields + _FIRST_ROW) + tl.load(fields + _ROWS) - chunk_row


@triton.jit
def _keep_piece(
    x: tl.tensor,
    inputs: tl.tensor,
    pieces: tl.tensor,
    piece: tl.tensor,
    chunk_row: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    channel: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    gated: tl.constexpr,
) -> None:
    """Keeps the inputs that a row behind the piece would read."""
    kept = tl.load(pieces + piece * _PIECE_FIELDS + _KEPT)
    if kept >= 0:
        end = _end_of(pieces, piece, chunk_row)
        ring = inputs + slot.to(tl.int64) * slot_stride
        to = inputs + kept.to(tl.int64) * slot_stride
        for back in tl.static_range(1, taps):
            since = end - back
            before = position + since
            at = (before % taps) * channels + channel
            new = (channel < channels) & (since >= 0)
            # The chunk's own ring has them.
            old = (channel < channels) & (since < 0) & (before >= 0) & (kept != slot)
            row = (chunk_row + since).to(tl.int64) * x_stride
            value = _input(x, row, channel, new, channels, gated)
            older = tl.load(ring + at, mask=old, other=0.0)
            tl.store(to + at, tl.where(since >= 0, value, older), mask=new | old)


@triton.jit
def _singles_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    captured: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    gated: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    wanted = channel < channels
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row)
    to = out + row * out_stride + channel
    if slot < 0:
        tl.store(to, tl.zeros([block], out.dtype.element_ty), mask=wanted)
        return
    position = tl.load(positions + row)
    newest = _input(x, row * x_stride, channel, wanted, channels, gated)
    ring = inputs + slot.to(tl.int64) * slot_stride
    total = _convolved_single(newest, ring, weight, bias, position, channel, wanted, channels, taps, has_bias)
    if silu:
        total = silu_of(total)
    if gated:
        gate = tl.load(x + row * x_stride + channels + channel, mask=wanted, other=0.0)
        total = total.to(gate.dtype).to(tl.float32) * gate.to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=wanted)
    _keep_single(newest, inputs, slot_stride, slot, tl.load(captured + row), position, channel, wanted, channels, taps)


@triton.jit
def _convolved_single(
    newest: tl.tensor,
    ring: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    position: tl.tensor,
    channel: tl.tensor,
    wanted: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
) -> tl.tensor:
    """The convolution of a row that is its sequence's only one, from the inputs in its ring and the newest, in
    float32.
    """
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(taps):
        before = position - (taps - 1 - tap)
        value = newest
        if tap < taps - 1:
            value = tl.load(ring + (before % taps) * channels + channel, mask=wanted & (before >= 0), other=0.0)
        scale = tl.load(weight + tap * channels + channel, mask=wanted, other=0.0)
        total = tl.fma(scale, value.to(tl.float32), total)
    if has_bias:
        total += tl.load(bias + channel, mask=wanted, other=0.0)
    return total


@triton.jit
def _keep_single(
    newest: tl.tensor,
    inputs: tl.tensor,
    slot_stride: tl.tensor,
    slot: tl.tensor,
    captured: tl.tensor,
    position: tl.tensor,
    channel: tl.tensor,
    wanted: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
) -> None:
    """Keeps a single row's input in its slot, and with those before it in the captured one, if any."""
    ring = inputs + slot.to(tl.int64) * slot_stride
    tl.store(ring + (position % taps) * channels + channel, newest, mask=wanted)
    if captured >= 0:
        other = inputs + captured.to(tl.int64) * slot_stride
        tl.store(other + (position % taps) * channels + channel, newest, mask=wanted)
        for back in tl.static_range(1, taps - 1):
            before = position - back
            at = (before % taps) * channels + channel
            there = wanted & (before >= 0)
            tl.store(other + at, tl.load(ring + at, mask=there, other=0.0), mask=there)

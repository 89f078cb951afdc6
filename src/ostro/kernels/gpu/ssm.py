"""Mamba-2's states, advanced by rows (`state_rows`), and what the rows read of them:

    inputs row    | z ...... | u ...... B .. C .. | t |
                       |       convolution, silu    |
                       |       S = kept * S + (t * u) Bᵀ          kept, t: of each head
                       |       y = S C + skip * u
                       └─ gate, norm ─> out

Rows are convolved first. A program then advances some rows of one head's matrix, kept in registers, by one row of
inputs or by a chunk's. Exactly means token after token: a token's sums have one order, wherever chunks and pieces are
cut. Otherwise it goes by pieces, as blocks whose products the tensor cores take; with e(i, j) what is kept of row j's
writing when row i reads:

    Y = (lower(C Bᵀ) ⊙ e) (t U) + e(i, 0) C Sᵀ + skip U          S = e(end, 0) S + Σ e(end, j) (t u)_j B_jᵀ

As a norm is over several heads, gating and norming is a kernel of its own, but for single rows without a norm.

The plain twin is `torch_models.recurrent.Mamba2`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu import state_rows
from ostro.kernels.gpu.state_conv import convolve_chunks, convolve_singles, keep_inputs, piece_at, silu_of
from ostro.kernels.gpu.state_rows import ChunkTables, KeptState, SingleRows
from ostro.kernels.gpu.tilings import power_of_two

_SLOT, _POSITION = tl.constexpr(state_rows.SLOT), tl.constexpr(state_rows.POSITION)
_FIRST_PIECE, _END_PIECE = tl.constexpr(state_rows.FIRST_PIECE), tl.constexpr(state_rows.END_PIECE)
_CHUNK_FIELDS = tl.constexpr(state_rows.CHUNK_FIELDS)
_FIRST_ROW, _ROWS, _KEPT = (
    tl.constexpr(state_rows.FIRST_ROW),
    tl.constexpr(state_rows.ROWS),
    tl.constexpr(state_rows.KEPT),
)
_PIECE_FIELDS = tl.constexpr(state_rows.PIECE_FIELDS)

_STEP_ROWS = 8
# Programs that share a piece's rows.
_GATE_LANES = 8


class SinglesTiling(NamedTuple):
    part: int
    """Rows of a head's matrix in a program; a power of two."""
    numbers: int
    """Numbers of a matrix for each warp."""


class ScanTiling(NamedTuple):
    """How a program goes through a chunk."""

    part: int = 8
    """Rows of a head's matrix; a power of two."""
    columns: int = 16
    """Columns that the threads of a row read at a time, four each: so a row's sum takes two exchanges of theirs."""
    stages: int = 4
    """One token is computed, and the inputs of one less are on their way."""
    warps: int = 1


class BlockTiling(NamedTuple):
    """How a program goes through a chunk by blocks."""

    part: int = 32
    """Rows of a head's matrix; a power of two."""
    warps: int = 8
    stages: int = 1


# Few heads' matrices in all leave most of the device idle, unless each is shared by many programs.
FEW_SINGLES, SINGLES, SCAN = SinglesTiling(8, 1024), SinglesTiling(32, 512), ScanTiling()
BLOCKS = BlockTiling()
_FEW = 256

# The shortest sides of products: compiled for shorter ones, they read beyond the shared memory that they have.
_SHORTEST_PART, _SHORTEST_COLUMNS = 32, 64
# A row that keeps less than exp of this leaves nothing of a state; more would make sums over a block less exact.
_FORGOTTEN = tl.constexpr(-64.0)


class SsmWeights(NamedTuple):
    """What `models.architecture.Mamba2` describes; tensors are in float32."""

    taps: Tensor
    """[taps, channels], oldest first"""
    bias: Tensor | None
    decay: Tensor
    step_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    eps: float
    norm_groups: int
    gates_normed: bool
    head_dim: int
    state_size: int
    groups: int

    @property
    def heads(self) -> int:
        return len(self.decay)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.width + 2 * self.groups * self.state_size


def ssm_singles(
    inputs: Tensor,
    weights: SsmWeights,
    state: KeptState,
    rows: SingleRows,
    out: Tensor,
    *,
    pdl: bool = False,
    tiling: SinglesTiling | None = None,
) -> None:
    """Advances the states of rows that are their sequences' only ones. `inputs` are [rows, 2 * width + 2 * groups *
    state_size + heads], `out` is [rows, width], both in the model's number format; zeros for rows without a slot.
    """
    matrices = _check(inputs, weights, state, out)
    height, columns = power_of_two(weights.head_dim), power_of_two(weights.state_size)
    if tiling is None:
        tiling = FEW_SINGLES if len(inputs) * weights.heads < _FEW else SINGLES
    part = min(tiling.part, height)
    fused = weights.norm is None
    y = out if fused else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    mixed = inputs[:, weights.width : weights.width + weights.channels]
    convolved = convolve_singles(mixed, weights.taps, weights.bias, state.inputs, rows, silu=True, pdl=pdl)
    _single_kernel[(len(inputs), weights.heads, triton.cdiv(weights.head_dim, part))](
        inputs,
        convolved,
        weights.decay,
        weights.step_bias,
        weights.skip,
        matrices,
        *rows,
        y,
        inputs.stride(0),
        matrices.stride(0),
        y.stride(0),
        heads=weights.heads,
        head_dim=weights.head_dim,
        state_size=weights.state_size,
        groups=weights.groups,
        gates=fused,
        part=part,
        columns=columns,
        pdl=pdl,
        num_warps=max(1, min(8, part * columns // tiling.numbers)),
        launch_pdl=pdl,
    )
    if not fused:
        _gate(inputs, y, weights, out, rows, pdl=pdl)


def ssm_chunks(
    inputs: Tensor,
    weights: SsmWeights,
    state: KeptState,
    tables: ChunkTables,
    out: Tensor,
    *,
    exact: bool,
    pdl: bool = False,
    tiling: ScanTiling = SCAN,
    blocks: BlockTiling = BLOCKS,
) -> None:
    """The same for chunks; rows of none are left alone. If `exact`, a row's bits depend neither on where chunks and
    pieces are cut nor on other chunks.
    """
    matrices = _check(inputs, weights, state, out)
    mixed = inputs[:, weights.width : weights.width + weights.channels]
    convolved = convolve_chunks(mixed, weights.taps, weights.bias, state.inputs, tables, silu=True, pdl=pdl)
    keep_inputs(mixed, state.inputs, tables, pdl=pdl)
    y = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    steps = _steps(inputs, weights, pdl=pdl)
    if exact:
        _scan(convolved, steps, weights, matrices, tables, y, tiling, pdl=pdl)
    else:
        # What rows read may have the precision of the model's numbers; what is written stays for all later rows.
        precision = "tf32x3" if inputs.dtype == torch.float32 else "tf32"
        _scan_blocks(convolved, steps, weights, matrices, tables, y, precision, blocks, pdl=pdl)
    _gate_chunks(inputs, y, weights, out, tables, pdl=pdl)


def _check(inputs: Tensor, weights: SsmWeights, state: KeptState, out: Tensor) -> Tensor:
    """The state's matrices."""
    matrices = state.matrices
    size = (weights.heads, weights.head_dim, weights.state_size)
    assert matrices is not None
    assert matrices.shape[1:] == size
    assert matrices.stride()[1:] == (size[1] * size[2], size[2], 1)
    assert matrices.dtype == torch.float32
    assert state.inputs.shape[1:] == weights.taps.shape
    assert state.inputs.stride()[1:] == (weights.channels, 1)
    assert state.inputs.dtype == inputs.dtype
    assert weights.taps.shape[1] == weights.channels
    assert weights.taps.is_contiguous()
    assert inputs.shape[1] == weights.width + weights.channels + weights.heads
    assert inputs.stride(1) == 1
    assert out.shape == (len(inputs), weights.width)
    assert out.stride(1) == 1
    assert weights.heads % weights.groups == 0
    return matrices


def _steps(inputs: Tensor, weights: SsmWeights, *, pdl: bool) -> Tensor:
    """[rows, heads, 2]: t, and the share of the state that is kept."""
    rows, heads = len(inputs), weights.heads
    steps = torch.empty(rows, heads, 2, dtype=torch.float32, device=inputs.device)
    _step_kernel[(triton.cdiv(rows, _STEP_ROWS),)](
        inputs,
        weights.decay,
        weights.step_bias,
        steps,
        rows,
        inputs.stride(0),
        first=weights.width + weights.channels,
        heads=heads,
        rows_block=_STEP_ROWS,
        heads_block=power_of_two(heads),
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return steps


def _scan(
    convolved: Tensor,
    steps: Tensor,
    weights: SsmWeights,
    matrices: Tensor,
    tables: ChunkTables,
    y: Tensor,
    tiling: ScanTiling,
    *,
    pdl: bool,
) -> None:
    part = min(tiling.part, power_of_two(weights.head_dim))
    columns = power_of_two(weights.state_size)
    lanes = min(tiling.columns, columns)
    _scan_kernel[(len(tables.chunks), weights.heads, triton.cdiv(weights.head_dim, part))](
        convolved,
        steps,
        weights.skip,
        matrices,
        *tables,
        y,
        matrices.stride(0),
        heads=weights.heads,
        head_dim=weights.head_dim,
        state_size=weights.state_size,
        groups=weights.groups,
        part=part,
        times=columns // lanes,
        lanes=lanes,
        stages=tiling.stages,
        pdl=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )


def _scan_blocks(
    convolved: Tensor,
    steps: Tensor,
    weights: SsmWeights,
    matrices: Tensor,
    tables: ChunkTables,
    y: Tensor,
    read_precision: str,
    tiling: BlockTiling,
    *,
    pdl: bool,
) -> None:
    part = max(_SHORTEST_PART, min(tiling.part, power_of_two(weights.head_dim)))
    _blocks_kernel[(len(tables.chunks), weights.heads, triton.cdiv(weights.head_dim, part))](
        convolved,
        steps,
        weights.decay,
        weights.skip,
        matrices,
        *tables,
        y,
        matrices.stride(0),
        heads=weights.heads,
        head_dim=weights.head_dim,
        state_size=weights.state_size,
        groups=weights.groups,
        rows=state_rows.PIECE_ROWS,
        part=part,
        columns=max(_SHORTEST_COLUMNS, power_of_two(weights.state_size)),
        read_precision=read_precision,
        pdl=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )


def _gate(inputs: Tensor, y: Tensor, weights: SsmWeights, out: Tensor, rows: SingleRows, *, pdl: bool) -> None:
    """Gates and norms y: out. Rows whose slot is -1 become zeros."""
    _gate_kernel[(len(inputs), weights.norm_groups)](
        *_gate_arguments(inputs, y, weights, out), rows.slots, **_gate_settings(weights, pdl=pdl)
    )


def _gate_chunks(
    inputs: Tensor, y: Tensor, weights: SsmWeights, out: Tensor, tables: ChunkTables, *, pdl: bool
) -> None:
    """The same for the rows of chunks; others are left alone."""
    _gate_chunks_kernel[(len(tables.pieces), _GATE_LANES, weights.norm_groups)](
        *_gate_arguments(inputs, y, weights, out),
        *tables,
        len(tables.chunks),
        lanes=_GATE_LANES,
        **_gate_settings(weights, pdl=pdl),
    )


def _gate_arguments(inputs: Tensor, y: Tensor, weights: SsmWeights, out: Tensor) -> tuple[object, ...]:
    norm = y if weights.norm is None else weights.norm
    return inputs, y, norm, out, weights.eps, inputs.stride(0), out.stride(0)


def _gate_settings(weights: SsmWeights, *, pdl: bool) -> Mapping[str, object]:
    group = weights.width // weights.norm_groups
    block = power_of_two(group)
    return {
        "width": weights.width,
        "group": group,
        "block": block,
        "norms": weights.norm is not None,
        "gates_normed": weights.gates_normed,
        "pdl": pdl,
        "num_warps": max(1, min(16, block // 256)),
        "launch_pdl": pdl,
    }


@triton.jit
def _step_of(t: tl.tensor, bias: tl.tensor, decay: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """softplus(t + bias), and the share of the state that is kept."""
    t = t.to(tl.float32) + bias
    small = tl.exp(-tl.abs(t))
    # log(1 + small), with what adding to 1 loses of it.
    above = 1.0 + small
    t = tl.maximum(t, 0.0) + (tl.log(above) + (small - (above - 1.0)) / above)
    return t, tl.exp(-tl.exp(decay) * t)


@triton.jit
def _single_kernel(
    inputs: tl.tensor,
    convolved: tl.tensor,
    decay: tl.tensor,
    step_bias: tl.tensor,
    skip: tl.tensor,
    matrices: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    captured: tl.tensor,
    y: tl.tensor,
    inputs_stride: tl.tensor,
    matrix_stride: tl.tensor,
    y_stride: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    groups: tl.constexpr,
    gates: tl.constexpr,
    part: tl.constexpr,
    columns: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    width: tl.constexpr = heads * head_dim
    channels: tl.constexpr = width + 2 * groups * state_size
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Vectors are matrices of one row or column, so that each thread reads what it needs of them itself.
    height = tl.program_id(2) * part + tl.arange(0, part)[:, None]
    column = tl.arange(0, columns)[None, :]
    of_head, of_state = height < head_dim, column < state_size
    # Before the wait: rows' slots, and the states, were there before the convolution.
    slot, position, other = tl.load(slots + row), tl.load(positions + row), tl.load(captured + row)
    at = (head * head_dim + height) * state_size + column
    there = of_head & of_state
    own = matrices + slot.to(tl.int64) * matrix_stride
    s = tl.load(own + at, mask=there & (slot >= 0) & (position > 0), other=0.0)
    own_bias, own_decay, own_skip = tl.load(step_bias + head), tl.load(decay + head), tl.load(skip + head)
    x = inputs + row * inputs_stride
    t, kept = _step_of(tl.load(x + width + channels + head), own_bias, own_decay)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    u_at = head * head_dim + height
    to = y + row * y_stride + u_at
    if slot < 0:
        tl.store(to, tl.zeros([part, 1], y.dtype.element_ty), mask=of_head)
        return
    mixed = convolved + row * channels
    b_at = width + head // (heads // groups) * state_size + column
    u = tl.load(mixed + u_at, mask=of_head, other=0.0)
    b = tl.load(mixed + b_at, mask=of_state, other=0.0)
    c = tl.load(mixed + b_at + groups * state_size, mask=of_state, other=0.0)
    s = s * kept + (t * u) * b
    tl.store(own + at, s, mask=there)
    if other >= 0:
        tl.store(matrices + other.to(tl.int64) * matrix_stride + at, s, mask=there)
    seen = tl.sum(s * c, 1, keep_dims=True) + own_skip * u
    if gates:
        seen *= silu_of(tl.load(x + u_at, mask=of_head, other=0.0).to(tl.float32))
    tl.store(to, seen.to(y.dtype.element_ty), mask=of_head)


@triton.jit(do_not_specialize=["rows"])
def _step_kernel(
    inputs: tl.tensor,
    decay: tl.tensor,
    step_bias: tl.tensor,
    steps: tl.tensor,
    rows: tl.tensor,
    inputs_stride: tl.tensor,
    first: tl.constexpr,
    heads: tl.constexpr,
    rows_block: tl.constexpr,
    heads_block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * rows_block + tl.arange(0, rows_block)).to(tl.int64)[:, None]
    head = tl.arange(0, heads_block)[None, :]
    own_bias = tl.load(step_bias + head, mask=head < heads, other=0.0)
    own_decay = tl.load(decay + head, mask=head < heads, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    inside = (row < rows) & (head < heads)
    t, kept = _step_of(
        tl.load(inputs + row * inputs_stride + first + head, mask=inside, other=0.0), own_bias, own_decay
    )
    to = steps + (row * heads + head) * 2
    tl.store(to, t, mask=inside)
    tl.store(to + 1, kept, mask=inside)


@triton.jit
def _scan_kernel(
    convolved: tl.tensor,
    steps: tl.tensor,
    skip: tl.tensor,
    matrices: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    y: tl.tensor,
    matrix_stride: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    groups: tl.constexpr,
    part: tl.constexpr,
    times: tl.constexpr,
    lanes: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    width: tl.constexpr = heads * head_dim
    channels: tl.constexpr = width + 2 * groups * state_size
    head = tl.program_id(1)
    group = head // (heads // groups)
    height = tl.program_id(2) * part + tl.arange(0, part)
    # Columns of a row go to threads so that each has some of all blocks of `lanes`.
    column = tl.arange(0, times)[:, None, None] * lanes + tl.arange(0, lanes)[None, None, :]
    of_head, of_state = height[None, :, None] < head_dim, column < state_size
    own_skip = tl.load(skip + head)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    fields = chunks + tl.program_id(0) * _CHUNK_FIELDS
    slot = tl.load(fields + _SLOT)
    if slot < 0:
        return
    at = (head * head_dim + height[None, :, None]) * state_size + column
    there = of_head & of_state
    s = tl.load(
        matrices + slot.to(tl.int64) * matrix_stride + at,
        mask=there & (tl.load(fields + _POSITION) > 0),
        other=0.0,
    )
    u_at = head * head_dim + height[None, :, None]
    b_at = width + group * state_size + column
    for piece in range(tl.load(fields + _FIRST_PIECE), tl.load(fields + _END_PIECE)):
        first = tl.load(pieces + piece * _PIECE_FIELDS + _FIRST_ROW)
        count = tl.load(pieces + piece * _PIECE_FIELDS + _ROWS)
        kept_in = tl.load(pieces + piece * _PIECE_FIELDS + _KEPT)
        for step in tl.range(0, count, num_stages=stages):
            row = (first + step).to(tl.int64)
            x = convolved + row * channels
            now = steps + (row * heads + head) * 2 + tl.zeros([1, 1, 1], tl.int32)
            b = tl.load(x + b_at, mask=of_state, other=0.0)
            c = tl.load(x + b_at + groups * state_size, mask=of_state, other=0.0)
            u = tl.load(x + u_at, mask=of_head, other=0.0)
            t, kept = tl.load(now), tl.load(now + 1)
            s = s * kept + (t * u) * b
            seen = tl.sum(tl.sum(s * c, 0, keep_dims=True), 2, keep_dims=True)
            seen = tl.fma(u, tl.broadcast_to(own_skip, u.shape), seen)
            tl.store(y + row * width + u_at, seen, mask=of_head)
        if kept_in >= 0:
            tl.store(matrices + kept_in.to(tl.int64) * matrix_stride + at, s, mask=there)


@triton.jit
def _blocks_kernel(
    convolved: tl.tensor,
    steps: tl.tensor,
    decay: tl.tensor,
    skip: tl.tensor,
    matrices: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    y: tl.tensor,
    matrix_stride: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    groups: tl.constexpr,
    rows: tl.constexpr,
    part: tl.constexpr,
    columns: tl.constexpr,
    read_precision: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    width: tl.constexpr = heads * head_dim
    channels: tl.constexpr = width + 2 * groups * state_size
    head = tl.program_id(1)
    of_piece = tl.arange(0, rows)
    height = tl.program_id(2) * part + tl.arange(0, part)
    column = tl.arange(0, columns)
    of_head, of_state = height < head_dim, column < state_size
    rate, own_skip = tl.exp(tl.load(decay + head)), tl.load(skip + head)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    fields = chunks + tl.program_id(0) * _CHUNK_FIELDS
    slot = tl.load(fields + _SLOT)
    if slot < 0:
        return
    # Transposed: products' results then have no side shorter than a block, however few rows of the matrix are here.
    at = (head * head_dim + height[None, :]) * state_size + column[:, None]
    there = of_head[None, :] & of_state[:, None]
    s = tl.load(
        matrices + slot.to(tl.int64) * matrix_stride + at,
        mask=there & (tl.load(fields + _POSITION) > 0),
        other=0.0,
    )
    u_at = head * head_dim + height[None, :]
    b_at = width + head // (heads // groups) * state_size + column[None, :]
    for piece in range(tl.load(fields + _FIRST_PIECE), tl.load(fields + _END_PIECE)):
        first = tl.load(pieces + piece * _PIECE_FIELDS + _FIRST_ROW)
        count = tl.load(pieces + piece * _PIECE_FIELDS + _ROWS)
        kept_in = tl.load(pieces + piece * _PIECE_FIELDS + _KEPT)
        # Rows behind the piece are zeros that forget nothing.
        row, inside = (first + of_piece).to(tl.int64), of_piece < count
        x = convolved + row[:, None] * channels
        b = tl.load(x + b_at, mask=inside[:, None] & of_state[None, :], other=0.0)
        c = tl.load(x + b_at + groups * state_size, mask=inside[:, None] & of_state[None, :], other=0.0)
        u = tl.load(x + u_at, mask=inside[:, None] & of_head[None, :], other=0.0)
        t = tl.load(steps + (row * heads + head) * 2, mask=inside, other=0.0)
        # How much a row keeps of the block's first state, as its logarithm.
        since = tl.cumsum(tl.maximum(-rate * t, _FORGOTTEN), 0)
        whole = tl.min(since, 0)
        earlier = of_piece[:, None] >= of_piece[None, :]
        between = tl.exp(tl.where(earlier, since[:, None] - since[None, :], float("-inf")))
        tu = t[:, None] * u
        alike = tl.dot(c, tl.trans(b), input_precision=read_precision) * between
        seen = tl.dot(c, s, input_precision=read_precision) * tl.exp(since)[:, None] + own_skip * u
        seen = tl.dot(alike, tu, seen, input_precision=read_precision)
        tl.store(y + row[:, None] * width + u_at, seen, mask=inside[:, None] & of_head[None, :])
        # Read again, rather than kept in registers that the products above need.
        b = tl.load(x + b_at, mask=inside[:, None] & of_state[None, :], other=0.0)
        written = tu * tl.exp(whole - since)[:, None]
        s = tl.dot(tl.trans(b), written, s * tl.exp(whole), input_precision="tf32x3")
        if kept_in >= 0:
            tl.store(matrices + kept_in.to(tl.int64) * matrix_stride + at, s, mask=there)


@triton.jit
def _gate_kernel(
    inputs: tl.tensor,
    y: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    inputs_stride: tl.tensor,
    out_stride: tl.tensor,
    slots: tl.tensor,
    width: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    norms: tl.constexpr,
    gates_normed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = _gated(inputs + row * inputs_stride, y + row * width, norm, eps, number, group, block, norms, gates_normed)
    value = tl.where(tl.load(slots + row) >= 0, value, 0.0)
    of_group = tl.arange(0, block)
    at = out + row * out_stride + number * group + of_group
    tl.store(at, value.to(out.dtype.element_ty), mask=of_group < group)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["chunks", "pieces"])
def _gate_chunks_kernel(
    inputs: tl.tensor,
    y: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    inputs_stride: tl.tensor,
    out_stride: tl.tensor,
    chunks: tl.tensor,
    pieces: tl.tensor,
    num_chunks: tl.tensor,
    lanes: tl.constexpr,
    width: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
    norms: tl.constexpr,
    gates_normed: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    piece, lane, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    slot, _, _, _, _ = piece_at(chunks, pieces, piece, num_chunks)
    if slot < 0:
        return
    first = tl.load(pieces + piece * _PIECE_FIELDS + _FIRST_ROW)
    count = tl.load(pieces + piece * _PIECE_FIELDS + _ROWS)
    of_group = tl.arange(0, block)
    for of_piece in range(lane, count, lanes):
        row = (first + of_piece).to(tl.int64)
        read = inputs + row * inputs_stride
        value = _gated(read, y + row * width, norm, eps, number, group, block, norms, gates_normed)
        at = out + row * out_stride + number * group + of_group
        tl.store(at, value.to(out.dtype.element_ty), mask=of_group < group)


@triton.jit
def _gated(
    inputs: tl.tensor,
    y: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    number: tl.tensor,
    group: tl.constexpr,
    block: tl.constexpr,
    norms: tl.constexpr,
    gates_normed: tl.constexpr,
) -> tl.tensor:
    """One group of a row."""
    of_group = tl.arange(0, block)
    at = number * group + of_group
    inside = of_group < group
    value = tl.load(y + at, mask=inside, other=0.0)
    gate = silu_of(tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32))
    if norms:
        if not gates_normed:
            value *= gate
        value *= tl.rsqrt(tl.sum(value * value, 0) / group + eps) * tl.load(norm + at, mask=inside, other=0.0)
        if gates_normed:
            value *= gate
    else:
        value *= gate
    return value

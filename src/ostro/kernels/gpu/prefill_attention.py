"""Prefill attention: causal attention of many new tokens per sequence over the paged KV cache, which already holds
their keys.

The host splits the new tokens into tiles, and a program handles one tile for one KV head. A tile holds all query heads
that share the KV head, so keys are read once for all of them:

    group of 2, tile of 8 rows     token 0: heads 0 1 | token 1: heads 0 1 | token 2: heads 0 1 | token 3: heads 0 1

    keys   |- masked: the window begins -|- seen by all queries of the tile -|- masked: the diagonal -|

Reads its tiles from device memory, and a tile may have no tokens: in a graph, the grid covers the most tiles that there
can be. Knows tiles, pages and heads; knows no sequences and no models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ostro.kernels.gpu.pages import operand, page_of, scaled, with_sinks, within_page
from ostro.models.architecture import AttentionSpec

_LOWEST = tl.constexpr(-1.0e30)
# Shared memory per multiprocessor, minus the compiler's own share.
_SHARED_MEMORY = 225 * 1024


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's new tokens: `length` from position `start`, at `offset` in the flat batch, pages in `row`."""

    row: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """Parameters that affect speed but, except for the order of sums, not the result."""

    rows: int = 128
    """Queries per tile, counting each head."""
    block: int = 64
    """Keys multiplied at once."""
    blocks_a_step: int = 1
    """Blocks per rescaling, 1 or 2, where no mask is needed."""
    buffers: int = 2
    warps: int = 8
    descriptors: bool = True
    """Whether the copy engine loads whole blocks; requires a page to hold a block."""


def tuning_for(dtype: torch.dtype) -> PrefillTuning:
    if dtype.itemsize <= 2:
        return PrefillTuning()
    # Exact fp32 matmuls do not run on tensor cores, and a tile must fit in registers.
    return PrefillTuning(rows=32, block=32, buffers=1, warps=4, descriptors=False)


def tokens_in_tile(heads: int, kv_heads: int, tuning: PrefillTuning) -> int:
    """The `block` for `prefill_tiles`."""
    assert heads // kv_heads <= tuning.rows
    return tuning.rows // (heads // kv_heads)


def prefill_tiles(chunks: Sequence[Chunk], block: int) -> list[tuple[int, int, int, int]]:
    """(row of the table, first token in the flat batch, its position, number of tokens) for each tile, in launch order.

    Long work comes first, to leave little to wait for at the end; but tiles of one sequence stay together, so that
    concurrent tiles read the same keys.
    """
    return [
        (chunk.row, chunk.offset + first, chunk.start + first, min(block, chunk.length - first))
        for chunk in sorted(chunks, key=lambda chunk: -(chunk.start + chunk.length))
        for first in range((chunk.length - 1) // block * block, -1, -block)
    ]


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    tuning: PrefillTuning | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends the tokens of the tiles, each to its sequence up to itself; fills those rows of `out` and returns it.

    q and out are [tokens, heads, head_dim], keys and values [pages, kv_heads, page_size, head_dim], tiles int32
    [tiles, 4] from `prefill_tiles` with at most `tokens_in_tile` tokens each, for the same tuning: `tuning_for` the
    dtype by default. Tiles of zeros have no tokens. Sinks are [heads]: see `architecture.Sinks`.
    """
    tuning = tuning or tuning_for(q.dtype)
    _, kv_heads, page_size, head_dim = keys.shape
    padded_dim = triton.next_power_of_2(head_dim)
    block, buffers = tuning.block, tuning.buffers
    # If wide heads exceed the shared memory, use fewer buffers first, then fewer keys at a time.
    vector_bytes = padded_dim * q.element_size()
    while (tuning.rows + 2 * block * tuning.blocks_a_step * (buffers + 1)) * vector_bytes > _SHARED_MEMORY:
        if buffers > 1:
            buffers -= 1
        else:
            block //= 2
    descriptors = tuning.descriptors and page_size % block == 0 and head_dim == padded_dim
    _prefill_kernel[(kv_heads, tiles.shape[0])](
        q,
        keys,
        values,
        _described(keys, block) if descriptors else None,
        _described(values, block) if descriptors else None,
        tables,
        tiles,
        out,
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        values.stride(0),
        tables.stride(0),
        sinks,
        group=q.shape[1] // kv_heads,
        head_dim=head_dim,
        padded_dim=padded_dim,
        page_size=page_size,
        rows=tuning.rows,
        block=block,
        blocks_a_step=tuning.blocks_a_step,
        windowed=spec.window is not None,
        capped=spec.softcap is not None,
        described=descriptors,
        # Two dependent loads, page number and keys, share the stages equally.
        stages=2 * buffers + 1,
        num_warps=tuning.warps,
    )
    return out


def _described(cache: Tensor, block: int) -> TensorDescriptor:
    pages, kv_heads, page_size, head_dim = cache.shape
    shape = [pages, kv_heads * page_size, head_dim]
    return TensorDescriptor(cache, shape, [cache.stride(0), head_dim, 1], [1, block, head_dim])


@triton.jit
def _prefill_kernel(
    q,
    keys,
    values,
    described_keys,
    described_values,
    tables,
    tiles,
    out,
    scale,
    softcap,
    window,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    key_page_stride,
    value_page_stride,
    table_stride,
    sinks,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    blocks_a_step: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    described: tl.constexpr,
    stages: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    token = tl.load(tile + 1)
    start = tl.load(tile + 2)
    count = tl.load(tile + 3)
    end = start + count

    index = tl.arange(0, rows)
    head = kv_head * group + index % group
    position = start + index // group
    dim = tl.arange(0, padded_dim)
    held = (position < end)[:, None] & (dim < head_dim)[None, :]
    at = (token + index // group).to(tl.int64)
    query_at = q + at[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    query = operand(tl.load(query_at, mask=held, other=0.0), keys)

    peak = tl.full([rows], _LOWEST, tl.float32)
    weight = tl.zeros([rows], tl.float32)
    mean = tl.zeros([rows, padded_dim], tl.float32)

    # Whole blocks, whose keys are all seen by both the first and the last query.
    step: tl.constexpr = block * blocks_a_step
    whole = 0
    if windowed:
        low = tl.maximum(start + 1 - window, 0) // block * block
        whole = tl.cdiv(tl.maximum(end - window, 0), block) * block
        mean, weight, peak = _attend_masked(
            query, mean, weight, peak, low, tl.minimum(whole, end), end, position, table, keys, values, scale, softcap,
            window, key_page_stride, value_page_stride, kv_head, head_dim, padded_dim, page_size, block, windowed,
            capped, stages,
        )  # fmt: skip
    whole_end = whole + tl.maximum(start + 1 - whole, 0) // step * step
    for base in tl.range(whole, whole_end, step, num_stages=stages):
        k, v = _whole_block(
            described_keys, described_values, keys, values, table, base, end, key_page_stride, value_page_stride,
            kv_head, head_dim, padded_dim, page_size, block, described,
        )  # fmt: skip
        score = _products(query, k, scale, softcap, capped)
        highest = tl.max(score, axis=1)
        if blocks_a_step == 2:
            k2, v2 = _whole_block(
                described_keys, described_values, keys, values, table, base + block, end, key_page_stride,
                value_page_stride, kv_head, head_dim, padded_dim, page_size, block, described,
            )  # fmt: skip
            score2 = _products(query, k2, scale, softcap, capped)
            highest = tl.maximum(highest, tl.max(score2, axis=1))
        factor = _factor(scale, capped)
        new_peak = tl.maximum(peak, highest * factor)
        fade = tl.exp2(peak - new_peak)
        mean = mean * fade[:, None]
        chance = tl.exp2(score * factor - new_peak[:, None])
        weight = weight * fade + tl.sum(chance, axis=1)
        mean = tl.dot(chance.to(query.dtype), v.to(query.dtype), mean, input_precision="ieee")
        if blocks_a_step == 2:
            chance2 = tl.exp2(score2 * factor - new_peak[:, None])
            weight += tl.sum(chance2, axis=1)
            mean = tl.dot(chance2.to(query.dtype), v2.to(query.dtype), mean, input_precision="ieee")
        peak = new_peak
    mean, weight, peak = _attend_masked(
        query, mean, weight, peak, whole_end, end, end, position, table, keys, values, scale, softcap, window,
        key_page_stride, value_page_stride, kv_head, head_dim, padded_dim, page_size, block, windowed, capped, stages,
    )  # fmt: skip

    weight = with_sinks(weight, peak, sinks, head, position < end)
    mean = mean / tl.where(weight > 0, weight, 1.0)[:, None]
    to = out + at[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(to, mean.to(out.dtype.element_ty), mask=held)


@triton.jit
def _attend_masked(
    query,
    mean,
    weight,
    peak,
    low,
    high,
    end,
    position,
    table,
    keys,
    values,
    scale,
    softcap,
    window,
    key_page_stride,
    value_page_stride,
    kv_head,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    stages: tl.constexpr,
):
    """Adds the keys from `low` to `high` that some queries see only partly. `low` is a multiple of block."""
    dim = tl.arange(0, padded_dim)
    for base in tl.range(low, high, block, num_stages=stages):
        key = base + tl.arange(0, block)
        page = page_of(table, base, end, page_size, block)
        within = within_page(base, kv_head, head_dim, page_size, block)
        # Keys beyond the end are masked to zero: the memory may contain NaNs.
        wanted = (key < end)[:, None]
        if head_dim != padded_dim:
            wanted = wanted & (dim < head_dim)[None, :]
        key_at = page * key_page_stride + within
        value_at = page * value_page_stride + within
        k = tl.load(keys + key_at[:, None] + dim[None, :], mask=wanted, other=0.0)
        v = tl.load(values + value_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(query.dtype)
        seen = key[None, :] <= position[:, None]
        if windowed:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, _products(query, k, scale, softcap, capped) * _factor(scale, capped), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        fade = tl.exp2(peak - new_peak)
        chance = tl.exp2(score - new_peak[:, None])
        weight = weight * fade + tl.sum(chance, axis=1)
        mean = tl.dot(chance.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
        peak = new_peak
    return mean, weight, peak


@triton.jit
def _whole_block(
    described_keys,
    described_values,
    keys,
    values,
    table,
    base,
    end,
    key_page_stride,
    value_page_stride,
    kv_head,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    described: tl.constexpr,
):
    """The keys and values of a fully written block."""
    if described:
        page = tl.load(table + base // page_size)
        slot = kv_head * page_size + base % page_size
        k = described_keys.load([page, slot, 0]).reshape([block, padded_dim])
        v = described_values.load([page, slot, 0]).reshape([block, padded_dim])
    else:
        dim = tl.arange(0, padded_dim)
        page = page_of(table, base, end, page_size, block)
        within = within_page(base, kv_head, head_dim, page_size, block)
        key_at = keys + (page * key_page_stride + within)[:, None] + dim[None, :]
        value_at = values + (page * value_page_stride + within)[:, None] + dim[None, :]
        if head_dim == padded_dim:
            k = tl.load(key_at)
            v = tl.load(value_at)
        else:
            k = tl.load(key_at, mask=(dim < head_dim)[None, :], other=0.0)
            v = tl.load(value_at, mask=(dim < head_dim)[None, :], other=0.0)
    return k, v


@triton.jit
def _products(query, k, scale, softcap, capped: tl.constexpr):
    """Scores without `_factor`, which one instruction can apply together with the peak."""
    score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee")
    if capped:
        score = scaled(score, scale, softcap, capped)
    return score


@triton.jit
def _factor(scale, capped: tl.constexpr):
    """Turns `_products` into exponents of two."""
    return 1.0 if capped else scale * 1.4426950408889634

"""Batch-invariant causal attention over the paged KV cache: results are bitwise identical in any batch.

Whether tokens come one at a time, in prompt chunks, or are recomputed later, each is a query in some tile, and a tile
walks the keys in aligned blocks, from the first block that its first query sees to its last query.

    keys      | block 0 | block 1 | block 2 | block 3 |
    query a     . . . .   . . . .   . x x x   x x           seen alone: blocks 2 and 3
    tile a b    . . . .   . . . .   . x x x   x x x         the same sums: what a query does not see adds zeros to it

All blocks take the same masked path: a shortcut for whole blocks would round differently, and which blocks are whole
depends on the tile. No sequence is split between programs, so a single long one is slow.

Reads its tiles from device memory, with one program per tile and head; a decode step has one tile per row, from
`single_tiles`. Knows tiles, pages and heads; knows no sequences and no models. The plain twin is `reference_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostro.kernels.gpu.decode_attention import page_of, scaled, within_page
from ostro.kernels.gpu.prefill_attention import PrefillTuning
from ostro.models.architecture import AttentionSpec

_LOWEST = tl.constexpr(-1.0e30)


def invariant_tuning(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> PrefillTuning:
    """One tuning for all tiles of a model: a compromise between single tokens and prompts."""
    least = triton.next_power_of_2(heads // kv_heads)
    if dtype.itemsize <= 2:
        return PrefillTuning(rows=max(64, least), block=64, buffers=2 if head_dim <= 128 else 1, warps=4)
    # Exact fp32 matmuls do not run on tensor cores, and a tile must fit in registers.
    return PrefillTuning(rows=max(32, least), block=32, buffers=1, warps=4)


def single_tiles(positions: Tensor, lens: Tensor) -> Tensor:
    """A tile per row for a step of single tokens, int32 [rows, 4]; a tile has no tokens if its length is 0."""
    rows = torch.arange(len(lens), dtype=torch.int32, device=lens.device)
    return torch.stack((rows, rows, positions, (lens > 0).int()), 1)


def invariant_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    spec: AttentionSpec,
    tuning: PrefillTuning,
) -> Tensor:
    """Attends the tokens of the tiles, each to its sequence up to itself; fills those rows of `out` and returns it.

    q and out are [tokens, heads, head_dim], keys and values [pages, kv_heads, page_size, head_dim], tiles int32
    [tiles, 4] from `single_tiles` or `prefill_tiles`, with at most `tokens_in_tile` tokens each.
    """
    _, kv_heads, page_size, head_dim = keys.shape
    _attention_kernel[(kv_heads, tiles.shape[0])](
        q,
        keys,
        values,
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
        group=q.shape[1] // kv_heads,
        head_dim=head_dim,
        padded_dim=triton.next_power_of_2(head_dim),
        page_size=page_size,
        rows=tuning.rows,
        block=tuning.block,
        windowed=spec.window is not None,
        capped=spec.softcap is not None,
        # Two dependent loads, page number and keys, share the stages equally.
        stages=2 * tuning.buffers + 1,
        num_warps=tuning.warps,
    )
    return out


@triton.jit(do_not_specialize=["window"])
def _attention_kernel(
    q,
    keys,
    values,
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
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    stages: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    token = tl.load(tile + 1)
    start = tl.load(tile + 2)
    end = start + tl.load(tile + 3)

    index = tl.arange(0, rows)
    head = kv_head * group + index % group
    position = start + index // group
    dim = tl.arange(0, padded_dim)
    held = (position < end)[:, None] & (dim < head_dim)[None, :]
    at = (token + index // group).to(tl.int64)
    query_at = q + at[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
    query = tl.load(query_at, mask=held, other=0.0)

    peak = tl.full([rows], _LOWEST, tl.float32)
    weight = tl.zeros([rows], tl.float32)
    mean = tl.zeros([rows, padded_dim], tl.float32)
    low = 0
    if windowed:
        low = tl.maximum(start + 1 - window, 0) // block * block
    for base in tl.range(low, end, block, num_stages=stages):
        key = base + tl.arange(0, block)
        page = page_of(table, base, end, page_size, block)
        within = within_page(base, kv_head, head_dim, page_size, block)
        # Keys beyond the end are masked to zero: the memory may contain NaNs.
        wanted = (key < end)[:, None]
        if head_dim != padded_dim:
            wanted = wanted & (dim < head_dim)[None, :]
        key_at = page * key_page_stride + within
        value_at = page * value_page_stride + within
        k = tl.load(keys + key_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(query.dtype)
        v = tl.load(values + value_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(query.dtype)
        seen = key[None, :] <= position[:, None]
        if windowed:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.dot(query, tl.trans(k), input_precision="ieee")
        score = tl.where(seen, scaled(score, scale, softcap, capped), float("-inf"))
        # A block that a query does not see leaves its peak unchanged, scales by one and adds zeros.
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        fade = tl.exp2(peak - new_peak)
        chance = tl.exp2(score - new_peak[:, None])
        weight = weight * fade + tl.sum(chance, axis=1)
        mean = tl.dot(chance.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
        peak = new_peak

    mean = mean / tl.where(weight > 0, weight, 1.0)[:, None]
    to = out + at[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(to, mean.to(out.dtype.element_ty), mask=held)

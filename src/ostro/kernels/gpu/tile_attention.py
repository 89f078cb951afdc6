"""Causal attention of one tile: consecutive tokens of one sequence, for one KV head, over the paged KV cache.

The kernel of `invariant_attention`, and of the JAX backend on GPUs. Imports no torch.
"""

import triton
import triton.language as tl

from ostro.kernels.gpu.pages import operand, page_of, scaled, with_sinks, within_page

_LOWEST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["window"])
def attend_tile(
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
    sinks,
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
    query = operand(tl.load(query_at, mask=held, other=0.0), keys)

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

    weight = with_sinks(weight, peak, sinks, head, position < end)
    mean = mean / tl.where(weight > 0, weight, 1.0)[:, None]
    to = out + at[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(to, mean.to(out.dtype.element_ty), mask=held)


@triton.jit
def attend_packed_tile(
    q,
    keys,
    values,
    tables,
    tiles,
    out,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    window: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    table_width: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """`attend_tile` for contiguous arrays. A softcap or a window of 0 is none."""
    token_stride: tl.constexpr = kv_heads * group * head_dim
    page_stride: tl.constexpr = kv_heads * page_size * head_dim
    attend_tile(
        q, keys, values, tables, tiles, out, scale, softcap, window, token_stride, head_dim, token_stride, head_dim,
        page_stride, page_stride, table_width, None, group, head_dim, padded_dim, page_size, rows, block, window > 0,
        softcap > 0, stages,
    )  # fmt: skip

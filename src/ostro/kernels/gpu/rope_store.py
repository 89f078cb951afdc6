"""Everything between the QKV projection and attention, in one pass: norms of queries and keys, rotary embedding, and
the KV cache write.

    qkv row   | q heads ........ | k heads .. | v heads .. |
                norm, rotate       norm, rotate     |
                     |                  |           |
                written back       keys[page, head, offset]  values[page, head, offset]

A norm is over each head, or over the width: over all query heads of a token, and over all its key heads. In the latter
case every program reads all heads, so queries are not written back but to memory of their own.

Knows the layout of the cache and where each token's slot is; knows no sequences. The cosines and sines of a step are
computed once, by `rotation_table`, and read by all layers. The plain twins are `rope_store_plain` and
`rotation_table_plain`.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# From this many tokens on, one program computes the rotations of several.
_MANY_TOKENS = 2048
# The number of tokens assumed for tiling if it must not depend on the actual number.
_INVARIANT_TOKENS = 256
# For norms over the width: numbers that a program reads at a time, and its minimum of warps.
_WIDTH_BLOCK, _WIDTH_WARPS = 1024, 4


class QKNormWeights(NamedTuple):
    weight: Tensor
    """[heads + kv_heads, head_dim]: a weight for each number in a token's queries and keys."""
    eps: float
    over: Literal["head", "width"] = "head"


def rotation_table(
    positions: Tensor,
    frequencies: Tensor,
    attention_factor: float = 1.0,
    *,
    invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Cosines and sines for positions [tokens], as float32 [tokens, 2, half].

    `frequencies` are non-negative float32 radians per position, [half]: the second half of Rotary's buffer. With
    `invariant`, the number of tokens does not choose between two compiled variants of the kernel.
    """
    tokens, half = len(positions), len(frequencies)
    table = frequencies.new_empty(tokens, 2, half)
    block = triton.next_power_of_2(half)
    rows = 1 if invariant or tokens < _MANY_TOKENS else 16
    _rotation_table_kernel[(triton.cdiv(tokens, rows),)](
        positions,
        frequencies,
        table,
        tokens,
        attention_factor,
        half=half,
        block=block,
        rows=rows,
        pdl=pdl,
        num_warps=4 if rows > 1 else 1,
        launch_pdl=pdl,
    )
    return table


def rotation_table_plain(positions: Tensor, frequencies: Tensor, attention_factor: float = 1.0) -> Tensor:
    angles = positions.float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), 1) * attention_factor


def rope_store(
    qkv: Tensor,
    table: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    norm: QKNormWeights | None = None,
    rotate_keys_in_place: bool = False,
    invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Norms and rotates queries and keys, writes k and v to the cache, and returns q [tokens, heads, head_dim]: a view
    of the qkv buffer, unless the norm is over the width.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; table: from `rotation_table`, None if nothing is rotated; slots:
    int64 [tokens], page * page_size + offset, or -1 for padding, which is not stored; keys, values: [pages, kv_heads,
    page_size, head_dim]. With `rotate_keys_in_place`, keys are also written back to the qkv buffer, for attention that
    reads them there. With `invariant`, the order of a norm's sum does not depend on the number of tokens.
    """
    tokens, (_, kv_heads, page_size, head_dim) = qkv.shape[0], keys.shape
    all_heads = qkv.shape[1] // head_dim
    heads = all_heads - 2 * kv_heads
    half = head_dim // 2 if table is None else table.shape[2]
    over = "" if norm is None else norm.over
    q = qkv[:, : heads * head_dim]
    heads_per_program, warps = _tile(_INVARIANT_TOKENS if invariant else tokens, all_heads, head_dim)
    if over == "width":
        assert not rotate_keys_in_place
        q, warps = torch.empty(q.shape, dtype=q.dtype, device=q.device), max(warps, _WIDTH_WARPS)
    assert keys.stride() == values.stride()
    _rope_store_kernel[(tokens, triton.cdiv(all_heads, heads_per_program))](
        qkv,
        q,
        qkv if table is None else table,
        slots,
        keys,
        values,
        qkv if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        qkv.stride(0),
        q.stride(0),
        keys.stride(0),
        keys.stride(1),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        half=half,
        half_block=triton.next_power_of_2(half),
        rest_block=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        block=heads_per_program,
        width_block=_WIDTH_BLOCK,
        norm=over,
        rotates=table is not None,
        keep_keys=rotate_keys_in_place,
        pdl=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return q.unflatten(1, (-1, head_dim))


def _tile(tokens: int, all_heads: int, head_dim: int) -> tuple[int, int]:
    """Heads and warps per program: few tokens are spread over the device, many are processed in larger pieces."""
    heads = 2 if tokens <= 64 else 8 if tokens <= 1024 else 16
    heads = min(heads, triton.next_power_of_2(all_heads))
    # Eight elements of either half per thread give 16-byte accesses.
    return heads, max(1, min(8, heads * triton.next_power_of_2(head_dim) // 512))


def rope_store_plain(
    qkv: Tensor,
    table: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    norm: QKNormWeights | None = None,
    rotate_keys_in_place: bool = False,
) -> Tensor:
    """The plain twin, except that q is always a view of the qkv buffer."""
    _, kv_heads, page_size, head_dim = keys.shape
    all_heads = qkv.view(len(qkv), -1, head_dim)
    heads = all_heads.shape[1] - 2 * kv_heads
    qk = all_heads[:, : heads + kv_heads].float()
    if norm is not None:
        squares = qk.square().mean(-1, keepdim=True)
        if norm.over == "width":
            squares = torch.cat(
                [part.mean(1, keepdim=True).expand_as(part) for part in squares.tensor_split([heads], 1)], 1
            )
        qk = qk * torch.rsqrt(squares + norm.eps) * norm.weight.float()
    if table is not None:
        half = table.shape[2]
        cos, sin = table[:, None, 0], table[:, None, 1]
        left, right, rest = qk.split((half, half, head_dim - 2 * half), -1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)
    qk = qk.to(qkv.dtype)
    all_heads[:, :heads] = qk[:, :heads]
    if rotate_keys_in_place:
        all_heads[:, heads : heads + kv_heads] = qk[:, heads:]
    kept = slots >= 0
    page, offset = slots[kept] // page_size, slots[kept] % page_size
    keys[page, :, offset] = qk[kept, heads:].to(keys.dtype)
    values[page, :, offset] = all_heads[kept, heads + kv_heads :].to(values.dtype)
    return all_heads[:, :heads]


@triton.jit(do_not_specialize=["tokens"])
def _rotation_table_kernel(
    positions: tl.tensor,
    frequencies: tl.tensor,
    table: tl.tensor,
    tokens: tl.tensor,
    attention_factor: tl.tensor,
    half: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    frequency = tl.load(frequencies + column, mask=column < half, other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    mask = (token < tokens)[:, None] & (column < half)[None, :]
    out = table + token.to(tl.int64)[:, None] * (2 * half) + column[None, :]
    tl.store(out, tl.cos(angle) * attention_factor, mask=mask)
    tl.store(out + half, tl.sin(angle) * attention_factor, mask=mask)


@triton.jit
def _rope_store_kernel(
    qkv: tl.tensor,
    q: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    token_stride: tl.tensor,
    q_stride: tl.tensor,
    page_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    block: tl.constexpr,
    width_block: tl.constexpr,
    norm: tl.constexpr,
    rotates: tl.constexpr,
    keep_keys: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block + tl.arange(0, block)[:, None]
    turns = head < heads + kv_heads
    column = tl.arange(0, half_block)[None, :]
    in_half = column < half
    inside = (head < heads + 2 * kv_heads) & in_half
    if norm != "":
        # Ones for heads that are not normed, so that their values pass through.
        scale = weight + head * head_dim + column
        left_scale = tl.load(scale, mask=turns & in_half, other=1.0).to(tl.float32)
        right_scale = tl.load(scale + half, mask=turns & in_half, other=1.0).to(tl.float32)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()

    source = qkv + token * token_stride + head * head_dim + column
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if rotates:
        # A pointer per head: every thread loads the angles it needs, in its own layout.
        angles = tl.broadcast_to(table + token * (2 * half) + column, [block, half_block])
        cos = tl.where(turns, tl.load(angles, mask=in_half, other=0.0), 1.0)
        sin = tl.where(turns, tl.load(angles + half, mask=in_half, other=0.0), 0.0)
    slot = tl.load(slots + token)
    # KV heads of one page; those of queries and padding are out of range and masked.
    page = slot // page_size
    cache_row = page * page_stride + (slot % page_size) * head_dim
    key_offset = cache_row + (head - heads) * kv_head_stride
    value_offset = cache_row + (head - heads - kv_heads) * kv_head_stride
    to_q = head < (heads + kv_heads if keep_keys else heads)
    to_keys = (slot >= 0) & (head >= heads) & turns
    to_values = (slot >= 0) & (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)

    if rest_block > 0:
        rest_column = tl.arange(0, rest_block)[None, :]
        in_rest = rest_column < head_dim - 2 * half
        rest_at = 2 * half + rest_column
        rest_source = qkv + token * token_stride + head * head_dim + rest_at
        rest = tl.load(rest_source, mask=(head < heads + 2 * kv_heads) & in_rest, other=0.0).to(tl.float32)
    if norm != "":
        if norm == "width":
            row = qkv + token * token_stride
            of_q, of_k = _mean_squares(row, heads * head_dim, kv_heads * head_dim, width_block)
            mean = tl.where(head < heads, of_q, of_k)
        else:
            squares = tl.sum(left * left + right * right, 1)
            if rest_block > 0:
                squares += tl.sum(rest * rest, 1)
            mean = (squares / head_dim)[:, None]
        factor = tl.where(turns, tl.rsqrt(mean + eps), 1.0)
        left = left * factor * left_scale
        right = right * factor * right_scale
        if rest_block > 0:
            rest_scale = tl.load(weight + head * head_dim + rest_at, mask=turns & in_rest, other=1.0)
            rest = rest * factor * rest_scale.to(tl.float32)
    turned_left, turned_right = left, right
    if rotates:
        turned_left = left * cos - right * sin
        turned_right = right * cos + left * sin
    turned_left = turned_left.to(qkv.dtype.element_ty)
    turned_right = turned_right.to(qkv.dtype.element_ty)

    target = qkv + token * token_stride + head * head_dim
    if norm == "width":
        target = q + token * q_stride + head * head_dim
    if rotates or norm != "":
        _store(target + column, turned_left, turned_right, to_q & in_half, half)
    _store(keys + key_offset + column, turned_left, turned_right, to_keys & in_half, half)
    _store(values + value_offset + column, turned_left, turned_right, to_values & in_half, half)
    if rest_block > 0:
        rest = rest.to(qkv.dtype.element_ty)
        if rotates or norm != "":
            tl.store(target + rest_at, rest, mask=to_q & in_rest)
        tl.store(keys + key_offset + rest_at, rest.to(keys.dtype.element_ty), mask=to_keys & in_rest)
        tl.store(values + value_offset + rest_at, rest.to(values.dtype.element_ty), mask=to_values & in_rest)


@triton.jit
def _mean_squares(
    row: tl.tensor, q_width: tl.constexpr, k_width: tl.constexpr, block: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The norm factors of all queries and of all keys in a qkv row."""
    of_q = tl.zeros([block], tl.float32)
    of_k = tl.zeros([block], tl.float32)
    for start in range(0, q_width + k_width, block):
        at = start + tl.arange(0, block)
        value = tl.load(row + at, mask=at < q_width + k_width, other=0.0).to(tl.float32)
        of_q += tl.where(at < q_width, value * value, 0.0)
        of_k += tl.where(at >= q_width, value * value, 0.0)
    return tl.sum(of_q) / q_width, tl.sum(of_k) / k_width


@triton.jit
def _store(at: tl.tensor, left: tl.tensor, right: tl.tensor, mask: tl.tensor, half: tl.constexpr) -> None:
    tl.store(at, left.to(at.dtype.element_ty), mask=mask)
    tl.store(at + half, right.to(at.dtype.element_ty), mask=mask)

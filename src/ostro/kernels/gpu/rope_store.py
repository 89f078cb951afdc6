"""Everything between the QKV projection and attention, in one pass: head norms, rotary embedding, and the KV cache
write.

    qkv row   | q heads ........ | k heads .. | v heads .. |
                norm, rotate       norm, rotate     |
                     |                  |           |
                written back       keys[page, head, offset]  values[page, head, offset]

Knows the layout of the cache and where each token's slot is; knows no sequences. The cosines and sines of a step are
computed once, by `rotation_table`, and read by all layers. The plain twins are `rope_store_plain` and
`rotation_table_plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The number of tokens assumed for tiling if it must not depend on the actual number.
_INVARIANT_TOKENS = 256


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
    rows = 1 if invariant else max(1, min(16, tokens // 256))
    _rotation_table_kernel[(triton.cdiv(tokens, rows),)](
        positions,
        frequencies,
        table,
        tokens,
        attention_factor,
        half=half,
        block=block,
        rows=triton.next_power_of_2(rows),
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
    table: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    rotate_keys_in_place: bool = False,
    invariant: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Rotates q in the qkv buffer, writes k and v to the cache, and returns q as a view [tokens, heads, head_dim].

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; table: from `rotation_table`; slots: int64 [tokens], page *
    page_size + offset, or -1 for padding, which is not stored; keys, values: [pages, kv_heads, page_size, head_dim].
    `norm` is HeadNorm's weight [heads + kv_heads, head_dim] and its eps. With `rotate_keys_in_place`, keys are also
    written back to the qkv buffer, for attention that reads them there. With `invariant`, the order of a norm's sum
    does not depend on the number of tokens.
    """
    tokens, (_, kv_heads, page_size, head_dim) = qkv.shape[0], keys.shape
    all_heads = qkv.shape[1] // head_dim
    half = table.shape[2]
    weight, eps = (table, 0.0) if norm is None else norm
    heads_per_program, warps = _tile(_INVARIANT_TOKENS if invariant else tokens, all_heads, head_dim)
    assert keys.stride() == values.stride()
    _rope_store_kernel[(tokens, triton.cdiv(all_heads, heads_per_program))](
        qkv,
        table,
        slots,
        keys,
        values,
        weight,
        eps,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        heads=all_heads - 2 * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        half=half,
        half_block=triton.next_power_of_2(half),
        rest_block=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        block=heads_per_program,
        has_norm=norm is not None,
        keep_keys=rotate_keys_in_place,
        pdl=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return qkv[:, : (all_heads - 2 * kv_heads) * head_dim].unflatten(1, (-1, head_dim))


def _tile(tokens: int, all_heads: int, head_dim: int) -> tuple[int, int]:
    """Heads and warps per program: few tokens are spread over the device, many are processed in larger pieces."""
    heads = 2 if tokens <= 64 else 8 if tokens <= 1024 else 16
    heads = min(heads, triton.next_power_of_2(all_heads))
    # Eight elements of either half per thread give 16-byte accesses.
    return heads, max(1, min(8, heads * triton.next_power_of_2(head_dim) // 512))


def rope_store_plain(
    qkv: Tensor,
    table: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    rotate_keys_in_place: bool = False,
) -> Tensor:
    _, kv_heads, page_size, head_dim = keys.shape
    all_heads = qkv.view(len(qkv), -1, head_dim)
    heads = all_heads.shape[1] - 2 * kv_heads
    qk = all_heads[:, : heads + kv_heads].float()
    if norm is not None:
        weight, eps = norm
        qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps) * weight.float()
    half = table.shape[2]
    cos, sin = table[:, None, 0], table[:, None, 1]
    left, right, rest = qk.split((half, half, head_dim - 2 * half), -1)
    qk = torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1).to(qkv.dtype)
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
    table: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    token_stride: tl.tensor,
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
    has_norm: tl.constexpr,
    keep_keys: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block + tl.arange(0, block)[:, None]
    turns = head < heads + kv_heads
    column = tl.arange(0, half_block)[None, :]
    in_half = column < half
    inside = (head < heads + 2 * kv_heads) & in_half
    if has_norm:
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
    to_qkv = head < (heads + kv_heads if keep_keys else heads)
    to_keys = (slot >= 0) & (head >= heads) & turns
    to_values = (slot >= 0) & (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)

    if rest_block > 0:
        rest_column = tl.arange(0, rest_block)[None, :]
        in_rest = rest_column < head_dim - 2 * half
        rest_at = 2 * half + rest_column
        rest_source = qkv + token * token_stride + head * head_dim + rest_at
        rest = tl.load(rest_source, mask=(head < heads + 2 * kv_heads) & in_rest, other=0.0).to(tl.float32)
    if has_norm:
        squares = tl.sum(left * left + right * right, 1)
        if rest_block > 0:
            squares += tl.sum(rest * rest, 1)
        factor = tl.where(turns, tl.rsqrt(squares / head_dim + eps)[:, None], 1.0)
        left = left * factor * left_scale
        right = right * factor * right_scale
        if rest_block > 0:
            rest_scale = tl.load(weight + head * head_dim + rest_at, mask=turns & in_rest, other=1.0)
            rest = rest * factor * rest_scale.to(tl.float32)
    turned_left = (left * cos - right * sin).to(qkv.dtype.element_ty)
    turned_right = (right * cos + left * sin).to(qkv.dtype.element_ty)

    _store(qkv + token * token_stride + head * head_dim + column, turned_left, turned_right, to_qkv & in_half, half)
    _store(keys + key_offset + column, turned_left, turned_right, to_keys & in_half, half)
    _store(values + value_offset + column, turned_left, turned_right, to_values & in_half, half)
    if rest_block > 0:
        rest = rest.to(qkv.dtype.element_ty)
        tl.store(rest_source, rest, mask=to_qkv & in_rest)
        tl.store(keys + key_offset + rest_at, rest.to(keys.dtype.element_ty), mask=to_keys & in_rest)
        tl.store(values + value_offset + rest_at, rest.to(values.dtype.element_ty), mask=to_values & in_rest)


@triton.jit
def _store(at: tl.tensor, left: tl.tensor, right: tl.tensor, mask: tl.tensor, half: tl.constexpr) -> None:
    tl.store(at, left.to(at.dtype.element_ty), mask=mask)
    tl.store(at + half, right.to(at.dtype.element_ty), mask=mask)

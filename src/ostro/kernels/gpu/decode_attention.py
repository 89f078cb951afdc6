"""Decode attention: one query per sequence over the paged KV cache, in a grid that does not depend on sequence lengths.

`plan_decode` turns the lengths into a work list on the device, once per step; every layer's `decode_attention` follows
it. A sequence is split into even parts, as many as the batch's total load requires, and the program that finishes a
sequence's last part merges them:

    lens   [ 600, 130, 0 ]          blocks of 64 keys   10, 3, 0        split 4
    list   A0 A1 A2 | B0 | C0       long parts first, so that none is left for the end; among equally long ones,
                                    first parts first, so that sequences read a shared prefix at the same time

An empty row has one empty part, which writes zeros.

Rows that begin with the same pages may form a group. Their prefix is then attended to by `prefix_attention`, for all of
them at once, and its parts are merged with the rows' own:

    A and B share 512 keys          A0 and B0: the prefix, from `prefix_attention`       A1 | B1: the rest

For few rows most of the time is latency: list, page and keys are dependent loads. With `pdl`, keys and values are
therefore prefetched into the L2 cache while the previous kernel still runs.

Queries and keys come normed and rotated, and keys and values are stored. Doing the work of `rope_store` here as well
would save a kernel per layer, but was 4 to 10 % slower on an H200: each part of a row repeats it.

Knows pages, rows and heads; knows no sequences and no models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.pages import operand, page_of, scaled, with_sinks, within_page
from ostro.kernels.gpu.prefix_attention import (
    GROUP_ARRAYS,
    GROUP_END,
    GROUP_KEYS,
    GROUP_OF,
    ITEM_FIELDS,
    PrefixScratch,
    PrefixTuning,
    prefix_attention,
)
from ostro.models.architecture import AttentionSpec

_GROUP_OF = tl.constexpr(GROUP_OF)
_GROUP_KEYS = tl.constexpr(GROUP_KEYS)
_GROUP_END = tl.constexpr(GROUP_END)
# Fields of the work list: row, first key, end of keys, part, parts of the row, the row's first partial-result slot, and
# the row's parts in this list: without those of a prefix.
_FIELDS = tl.constexpr(ITEM_FIELDS)
# A finite stand-in for minus infinity: the difference of two infinities would be NaN.
_LOWEST = tl.constexpr(-1.0e30)

# Prefetch only for this fraction of few rows: more delays the earlier kernels by as much as it gains.
_FEW_AHEAD = 4
# Queries per tile: the minimum for tensor cores. A larger group of query heads takes several tiles.
_TILE = 16
# Rows of partial results that a program merges at once.
_JOINED_ROWS = 32
# Programs whose registers fit on a multiprocessor at once: they take up to 163 a thread.
_MOST_RESIDENT = 3
# Bytes of shared memory that the driver reserves in each program.
_RESERVED = 1024
_SHARED_MEMORY = 200 * 1024
# What a multiprocessor has where the device cannot be asked: Hopper's.
_SHARED_MEMORY_PER_SM = 228 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """Parameters that affect speed but, except for the order of sums, not the result."""

    block: int = 64
    """Keys per iteration; parts are split at multiples of it."""
    warps: int = 4
    buffers: int = 2
    """Blocks of keys and values buffered per program, so that it computes on one while others are loaded."""
    programs_per_sm: int | None = None
    """The maximum; each program then processes several parts. None: for few rows, as many as fit at once, so that no
    time is spent on programs without work; otherwise one per part, scheduled by the hardware."""
    parts_per_sm: int = 2
    """How finely to split a batch: parts times KV heads, per multiprocessor. Long parts load one block while they
    compute on another. With 12, an H200 takes up to 2.5 times as long: bench/kernels/decode_splits.py."""
    resident: int | None = None
    """Programs that fit on a multiprocessor at once. None: computed from the shared memory that they take."""
    ahead: int = 4
    """For very few rows, blocks of a part that are prefetched into the cache while the previous kernel still runs."""
    joins_in_place: bool = True
    """Whether the last part to finish merges the row; otherwise a second kernel does."""

    def buffers_of(self, vector_bytes: int) -> int:
        """The buffers that fit into a program's shared memory."""
        return max(1, min(self.buffers, _SHARED_MEMORY // (2 * self.block * vector_bytes)))

    def shared_memory(self, padded_dim: int, element_size: int) -> int:
        """Bytes of shared memory that a program takes, for keys and values in elements of this size."""
        vector_bytes = padded_dim * element_size
        # Besides the buffers: the tile of queries and that of weights, as the tensor cores read them.
        operands = _TILE * (padded_dim + self.block) * max(2, element_size)
        return self.buffers_of(vector_bytes) * 2 * self.block * vector_bytes + operands + _RESERVED


class DecodeScratch:
    """Work lists, partial results and counters for up to `max_rows` rows, shared by all layers of a model in turn."""

    def __init__(
        self,
        max_rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        device: torch.device,
        *,
        windows: Sequence[int | None] = (None,),
        tuning: DecodeTuning | None = None,
        prefix_tuning: PrefixTuning | None = None,
        processors: int | None = None,
        overlaps: bool | None = None,
    ) -> None:
        """Without a `prefix_tuning` there are no groups. The device itself is asked for its number of multiprocessors,
        and whether it supports programmatic dependent launch, unless they are given.
        """
        self.max_rows = max_rows
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.tuning = tuning or DecodeTuning()
        self.tiles = kv_heads * triton.cdiv(heads // kv_heads, _TILE)
        self.processors = _processors(device) if processors is None else processors
        self.overlaps = supports_overlaps(device) if overlaps is None else overlaps
        self.target = max(1, triton.cdiv(self.processors * self.tuning.parts_per_sm, self.tiles))
        self._memory_per_sm = _memory_per_sm(device)
        # With parts of at least total / target, each row has at most one part more than its share.
        capacity = max_rows + self.target
        self.items = {w: torch.zeros(capacity, _FIELDS.value, dtype=torch.int32, device=device) for w in windows}
        self.counts = {w: torch.zeros(1, dtype=torch.int32, device=device) for w in windows}
        self.row_parts = {w: torch.zeros(max_rows, 2, dtype=torch.int32, device=device) for w in windows}
        self.prefix = (
            None
            if prefix_tuning is None
            else PrefixScratch(max_rows, heads // kv_heads, kv_heads, self.processors, device, prefix_tuning)
        )
        slots = capacity + (0 if self.prefix is None else self.prefix.slots)
        self.partial = torch.zeros(slots, heads, head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.zeros(slots, heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows, self.tiles, dtype=torch.int32, device=device)

    def programs(self, rows: int, element_size: int) -> int:
        """How many to launch for this many rows; keys and values have elements of this size."""
        most = (rows + self.target) * self.tiles
        if self.tuning.programs_per_sm is not None:
            return min(most, self.processors * self.tuning.programs_per_sm)
        # For few rows all that fit, though many find no work: with fewer, Llama 3.2 1B lost 2 %.
        return self.processors * self.resident(element_size) if self.is_for_few(rows) else most

    def resident(self, element_size: int) -> int:
        """Programs that fit on a multiprocessor at once."""
        if self.tuning.resident is not None:
            return self.tuning.resident
        each = self.tuning.shared_memory(triton.next_power_of_2(self.head_dim), element_size)
        return max(1, min(_MOST_RESIDENT, self._memory_per_sm // each))

    def is_for_few(self, rows: int) -> bool:
        """Whether this number of rows leaves multiprocessors idle unless they are split."""
        return rows * self.tiles <= self.processors


def plan_sizes(rows: int) -> list[int]:
    """The sizes that rows are padded to, up to the one for `rows`. Each is a binary of its own, so there are few."""
    sizes = [32]
    while sizes[-1] < rows:
        sizes.append(8 * sizes[-1])
    return sizes


def plan_decode(lens: Tensor, scratch: DecodeScratch, window: int | None = None, groups: Tensor | None = None) -> None:
    """Writes the work list of this window for these lengths; valid until the lengths change.

    `groups` are rows with a common prefix (see `prefix_attention.group_arrays`); not with a window.
    """
    rows = lens.shape[0]
    prefix = None if groups is None else scratch.prefix
    assert rows <= scratch.max_rows
    if groups is not None:
        assert window is None
        assert prefix is not None
        assert groups.shape[0] == GROUP_ARRAYS
        assert groups.shape[1] >= rows
    _plan_kernel[(rows,)](
        lens,
        scratch.items[window],
        scratch.counts[window],
        scratch.row_parts[window],
        groups,
        None if prefix is None else prefix.items,
        None if prefix is None else prefix.count,
        rows,
        scratch.target,
        window or 0,
        0 if groups is None else groups.stride(0),
        0 if prefix is None else prefix.target,
        rows_padded=plan_sizes(rows)[-1],
        block=scratch.tuning.block,
        windowed=window is not None,
        grouped=groups is not None,
        group=scratch.heads // scratch.kv_heads,
        tile=0 if prefix is None else prefix.tuning.queries,
        chunk=8,
        num_warps=4,
    )


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    scratch: DecodeScratch,
    out: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    *,
    groups: Tensor | None = None,
    pdl: bool = False,
    leads: bool = False,
) -> Tensor:
    """Attends each row's single query to its sequence, as planned for `spec.window` with the same `groups`; fills and
    returns `out`.

    q and out are [rows, heads, head_dim], keys and values [pages, kv_heads, page_size, head_dim], sinks [heads] (see
    `architecture.Sinks`). For `pdl` see `small_batch`; here the plan and the page tables are read before the wait as
    well, so a kernel launched without `pdl` must come between them and the first such call. With `leads`, the next
    kernel may start ahead.
    """
    # Rows' own keys are read while prefixes are still being attended to.
    follows = groups is not None and scratch.overlaps
    if groups is not None:
        assert scratch.prefix is not None
        prefix_attention(
            q,
            keys,
            values,
            tables,
            groups,
            scratch.row_parts[spec.window],
            scratch.prefix,
            scratch.partial,
            scratch.partial_lse,
            spec,
            block=scratch.tuning.block,
            pdl=pdl,
            leads=follows,
        )
    rows, heads, head_dim = q.shape
    group = heads // keys.shape[1]
    padded_dim = triton.next_power_of_2(head_dim)
    tuning = scratch.tuning
    assert (heads, head_dim) == (scratch.heads, scratch.head_dim)
    assert keys.shape[1:] == (scratch.kv_heads, scratch.page_size, head_dim) == values.shape[1:]
    tile_rows = min(_TILE, triton.next_power_of_2(group))
    shape = {
        "kv_heads": keys.shape[1],
        "group": group,
        "head_dim": head_dim,
        "padded_dim": padded_dim,
        "tile_rows": tile_rows,
        "join_chunk": max(1, _JOINED_ROWS * 128 // (tile_rows * max(128, padded_dim))),
    }
    buffers = tuning.buffers_of(padded_dim * keys.element_size())
    _decode_kernel[(scratch.programs(rows, keys.element_size()),)](
        q,
        keys,
        values,
        tables,
        scratch.items[spec.window],
        scratch.counts[spec.window],
        scratch.partial,
        scratch.partial_lse,
        scratch.arrived,
        out,
        spec.scale,
        spec.softcap or 0.0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        keys.stride(0),
        values.stride(0),
        tables.stride(0),
        sinks,
        **shape,
        tile=_TILE,
        page_size=scratch.page_size,
        block=tuning.block,
        windowed=spec.window is not None,
        capped=spec.softcap is not None,
        joins=tuning.joins_in_place,
        grouped=groups is not None,
        follows=follows,
        ahead=tuning.ahead if pdl and scratch.is_for_few(_FEW_AHEAD * rows) else 0,
        # Two dependent loads, page number and keys, share the stages equally.
        stages=2 * buffers + 1,
        pdl=pdl,
        leads=leads,
        num_warps=tuning.warps,
        launch_pdl=pdl or follows,
    )
    if not tuning.joins_in_place:
        _join_kernel[(rows, scratch.tiles)](
            scratch.row_parts[spec.window],
            scratch.partial,
            scratch.partial_lse,
            out,
            out.stride(0),
            out.stride(1),
            sinks,
            **shape,
            tile=_TILE,
            num_warps=2,
        )
    return out


def reference_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    start: int,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """The plain twin for one sequence: q is [tokens, heads, head_dim], its tokens are at positions `start` onwards.

    Gathers the sequence's keys and values, masks, and applies the formula in fp32.
    """
    end = start + q.shape[0]
    used = pages[: -(-end // keys.shape[2])].long()
    k, v = (cache[used].transpose(0, 1).flatten(1, 2)[:, :end].float() for cache in (keys, values))
    queries = q.float().unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
    scores = queries @ k[:, None].transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    at = torch.arange(start, end, device=q.device)[:, None]
    of = torch.arange(end, device=q.device)
    hidden = of > at if spec.window is None else (of > at) | (of <= at - spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :end]
    return (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)


def supports_overlaps(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch: Hopper or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _processors(device: torch.device) -> int:
    # Few programs in the interpreter, so that each has several parts to process.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _memory_per_sm(device: torch.device) -> int:
    if device.type != "cuda":
        return _SHARED_MEMORY_PER_SM
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@triton.jit(do_not_specialize=["lens", "rows", "target", "window", "groups_stride", "prefix_target"])
def _plan_kernel(
    lens,
    items,
    count,
    row_parts,
    groups,
    prefix_items,
    prefix_count,
    rows,
    target,
    window,
    groups_stride,
    prefix_target,
    rows_padded: tl.constexpr,
    block: tl.constexpr,
    windowed: tl.constexpr,
    grouped: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
):
    """One program per row; each recounts all rows' parts, which is cheaper than a second kernel. The program of row i
    also lists the work of group i.
    """
    row = tl.program_id(0)
    every = tl.arange(0, rows_padded)
    lengths = tl.load(lens + every, mask=every < rows, other=0)
    length = tl.load(lens + row)
    low = 0
    blocks = tl.cdiv(lengths, block)
    if windowed:
        blocks -= tl.maximum(lengths - window, 0) // block
        low = tl.maximum(length - window, 0)
    if grouped:
        prefix_split = _plan_prefixes(
            groups, groups_stride, prefix_items, prefix_count, row, rows, prefix_target, rows_padded, block, group,
            tile, chunk,
        )  # fmt: skip
        member_of = tl.load(groups + _GROUP_OF * groups_stride + every, mask=every < rows, other=-1)
        shared = tl.load(groups + _GROUP_KEYS * groups_stride + member_of, mask=member_of >= 0, other=0)
        # Parts of each row that `prefix_attention` computes.
        prefix_parts = tl.cdiv(shared // block, prefix_split)
        blocks = tl.maximum(blocks - shared // block, 0)
        low = tl.sum(tl.where(every == row, shared, 0))
        # A graph is captured with idle rows, whatever their groups.
        length = tl.maximum(length, low)
    first_block = low // block
    row_blocks = tl.cdiv(length, block) - first_block
    split = tl.maximum(tl.cdiv(tl.sum(blocks), target), 1)
    parts = tl.where(every < rows, tl.maximum(tl.cdiv(blocks, split), 1), 0)
    num_parts = tl.maximum(tl.cdiv(row_blocks, split), 1)
    before = (every < row).to(tl.int32)
    held = parts
    prefixed = 0
    if grouped:
        held = prefix_parts + parts
        prefixed = tl.sum(tl.where(every == row, prefix_parts, 0))
    slot = tl.sum(held * before)
    # Rows with longer parts and with equally long parts: long parts must not be left for the end.
    sizes = tl.cdiv(blocks, tl.maximum(parts, 1))
    size = tl.cdiv(row_blocks, num_parts)
    longer = tl.where(sizes > size, parts, 0)
    alike = tl.where(sizes == size, parts, 0)
    tl.store(row_parts + row * 2, prefixed + num_parts)
    tl.store(row_parts + row * 2 + 1, slot)
    if row == 0:
        tl.store(count, tl.sum(parts))
    for base in range(0, num_parts, chunk):
        part = base + tl.arange(0, chunk)
        mine = part < num_parts
        # List order: all longer parts; then, among equally long ones, all lower-numbered parts of every row, then this
        # part of the preceding rows.
        place = tl.sum(longer) + tl.sum(tl.minimum(alike[None, :], part[:, None] + before[None, :]), axis=1)
        item = items + place * _FIELDS
        first, end = _keys_of(part, num_parts, low, length, block)
        tl.store(item, tl.zeros_like(part) + row, mask=mine)
        tl.store(item + 1, first, mask=mine)
        tl.store(item + 2, end, mask=mine)
        tl.store(item + 3, prefixed + part, mask=mine)
        tl.store(item + 4, tl.zeros_like(part) + prefixed + num_parts, mask=mine)
        tl.store(item + 5, tl.zeros_like(part) + slot, mask=mine)
        if grouped:
            tl.store(item + 6, tl.zeros_like(part) + num_parts, mask=mine)


@triton.jit
def _keys_of(part, num_parts, low, length, block: tl.constexpr):
    """The first key of a part of the keys from `low` to `length`, and their end."""
    first_block = low // block
    blocks = tl.cdiv(length, block) - first_block
    first = (first_block + part * blocks // num_parts) * block
    end = (first_block + (part + 1) * blocks // num_parts) * block
    return tl.maximum(first, low), tl.minimum(end, length)


@triton.jit
def _plan_prefixes(
    groups,
    groups_stride,
    items,
    count,
    number,
    rows,
    target,
    rows_padded: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
):
    """Lists one group's work for `prefix_attention`; nothing if there is no such group. Returns the most blocks in a
    part.
    """
    every = tl.arange(0, rows_padded)
    shared = tl.load(groups + _GROUP_KEYS * groups_stride + every, mask=every < rows, other=0)
    ends = tl.load(groups + _GROUP_END * groups_stride + every, mask=every < rows, other=0)
    begins = tl.load(groups + _GROUP_END * groups_stride + every - 1, mask=(every > 0) & (every < rows), other=0)
    blocks = shared // block
    tiles = tl.where(blocks > 0, tl.cdiv((ends - begins) * group, tile), 0)
    split = tl.maximum(tl.cdiv(tl.sum(tiles * blocks), target), 1)
    # Parts are rounded up. Slightly more of them than fit at once would take twice the time, so they are made longer
    # instead.
    for _ in range(8):
        split += tl.where(tl.sum(tiles * tl.cdiv(blocks, split)) > target, tl.cdiv(split, 8), 0)
    work = tiles * tl.cdiv(blocks, split)
    if number == 0:
        tl.store(count, tl.sum(work))
    mine = every == number
    at = tl.sum(tl.where(every < number, work, 0))
    num_items = tl.sum(tl.where(mine, work, 0))
    num_tiles = tl.maximum(tl.sum(tl.where(mine, tiles, 0)), 1)
    num_blocks = tl.sum(tl.where(mine, blocks, 0))
    begin = tl.sum(tl.where(mine, begins, 0))
    num_rows = tl.sum(tl.where(mine, ends - begins, 0))
    num_parts = tl.maximum(tl.cdiv(num_blocks, split), 1)
    for base in range(0, num_items, chunk):
        index = base + tl.arange(0, chunk)
        listed = index < num_items
        part = index // num_tiles
        item = items + (at + index) * _FIELDS
        tl.store(item, tl.zeros_like(index) + begin, mask=listed)
        tl.store(item + 1, tl.zeros_like(index) + num_rows, mask=listed)
        tl.store(item + 2, index % num_tiles, mask=listed)
        tl.store(item + 3, part * num_blocks // num_parts * block, mask=listed)
        tl.store(item + 4, (part + 1) * num_blocks // num_parts * block, mask=listed)
        tl.store(item + 5, part, mask=listed)
    return split


@triton.jit
def _decode_kernel(
    q,
    keys,
    values,
    tables,
    items,
    count,
    partial,
    partial_lse,
    arrived,
    out,
    scale,
    softcap,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    key_page_stride,
    value_page_stride,
    table_stride,
    sinks,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    join_chunk: tl.constexpr,
    tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    joins: tl.constexpr,
    grouped: tl.constexpr,
    follows: tl.constexpr,
    ahead: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
    leads: tl.constexpr,
):
    """`follows`: this kernel starts once everything before `prefix_attention` has ended, and must wait for it alone."""
    if leads:
        gdc_launch_dependents()
    tiles_a_head: tl.constexpr = (group + tile - 1) // tile
    tiles: tl.constexpr = kv_heads * tiles_a_head
    total = tl.load(count) * tiles
    if ahead > 0 and page_size % block == 0 and tl.program_id(0) < total:
        item = items + (tl.program_id(0) // tiles) * _FIELDS
        table = tables + tl.load(item).to(tl.int64) * table_stride
        kv_head = tl.program_id(0) % tiles // tiles_a_head
        first = tl.load(item + 1) // block * block
        end = tl.minimum(tl.load(item + 2), first + ahead * block)
        for base in range(first, end, block):
            page = tl.load(table + base // page_size).to(tl.int64)
            within = (kv_head * page_size + base % page_size) * head_dim
            size: tl.constexpr = block * head_dim * keys.dtype.element_ty.primitive_bitwidth // 8
            _bring_to_cache(keys + page * key_page_stride + within, size)
            _bring_to_cache(values + page * value_page_stride + within, size)
    if pdl and not follows:
        gdc_wait()
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        # Heads are innermost, so that a page's heads are read at about the same time.
        item = items + (work // tiles) * _FIELDS
        head_tile = work % tiles
        kv_head = head_tile // tiles_a_head
        row = tl.load(item)
        first = tl.load(item + 1)
        end = tl.load(item + 2)
        part = tl.load(item + 3)
        num_parts = tl.load(item + 4)
        slot = tl.load(item + 5)
        awaited = tl.load(item + 6) if grouped else num_parts

        member = (head_tile % tiles_a_head) * tile + tl.arange(0, tile)
        head = kv_head * group + member
        dim = tl.arange(0, padded_dim)
        held = (member < group)[:, None] & (dim < head_dim)[None, :]
        q_row = q + row.to(tl.int64) * q_row_stride
        at = q_row + head[:, None] * q_head_stride + dim[None, :]
        query = operand(tl.load(at, mask=held, other=0.0), keys)

        peak = tl.full([tile], _LOWEST, tl.float32)
        weight = tl.zeros([tile], tl.float32)
        mean = tl.zeros([tile, padded_dim], tl.float32)

        table = tables + row.to(tl.int64) * table_stride
        for base in tl.range(first // block * block, end, block, num_stages=stages):
            key = base + tl.arange(0, block)
            seen = key < end
            if windowed:
                seen = seen & (key >= first)
            page = page_of(table, base, end, page_size, block)
            within = within_page(base, kv_head, head_dim, page_size, block)
            key_at = page * key_page_stride + within
            value_at = page * value_page_stride + within
            # Keys beyond the end are masked to zero: the memory may contain NaNs.
            wanted = seen[:, None]
            if head_dim != padded_dim:
                wanted = wanted & (dim < head_dim)[None, :]
            k = tl.load(keys + key_at[:, None] + dim[None, :], mask=wanted, other=0.0)
            v = tl.load(values + value_at[:, None] + dim[None, :], mask=wanted, other=0.0)
            score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee")
            score = tl.where(seen[None, :], scaled(score, scale, softcap, capped), float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, axis=1))
            chance = tl.exp2(score - new_peak[:, None])
            fade = tl.exp2(peak - new_peak)
            weight = weight * fade + tl.sum(chance, axis=1)
            v = v.to(query.dtype)
            mean = tl.dot(chance.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
            peak = new_peak

        total_weight = weight
        if sinks is not None:
            # With several parts, sinks are counted once, when the parts are merged.
            total_weight = tl.where(num_parts == 1, with_sinks(weight, peak, sinks, head, member < group), weight)
        mean = mean / tl.where(total_weight > 0, total_weight, 1.0)[:, None]
        if num_parts == 1:
            to = out + row.to(tl.int64) * out_row_stride + head[:, None] * out_head_stride + dim[None, :]
            tl.store(to, mean.to(out.dtype.element_ty), mask=held)
        else:
            if grouped:
                # An idle row of a group has an empty part.
                weight = tl.where(weight > 0, weight, 1.0)
            line = (slot + part).to(tl.int64) * (kv_heads * group) + head
            tl.store(partial + line[:, None] * head_dim + dim[None, :], mean, mask=held)
            tl.store(partial_lse + line, peak + tl.log2(weight), mask=member < group)
            if joins:
                # All threads' stores must precede the one thread's release.
                tl.debug_barrier()
                counter = arrived + row * tiles + head_tile
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == awaited - 1:
                    if follows:
                        gdc_wait()
                    _join_parts(
                        partial,
                        partial_lse,
                        out + row.to(tl.int64) * out_row_stride,
                        out_head_stride,
                        slot,
                        num_parts,
                        head_tile,
                        sinks,
                        kv_heads,
                        group,
                        head_dim,
                        padded_dim,
                        tile_rows,
                        join_chunk,
                        tile,
                    )
                    # Reset for the next layer, which starts after this one has ended.
                    tl.store(counter, 0)
    if follows:
        # The next kernel waits for this one alone.
        gdc_wait()


@triton.jit
def _bring_to_cache(at, size: tl.constexpr):
    """Has the copy engine prefetch this many bytes into the L2 cache; only the first thread does so."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [at, tl.full([], size, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _join_kernel(
    row_parts,
    partial,
    partial_lse,
    out,
    out_row_stride,
    out_head_stride,
    sinks,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    join_chunk: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0)
    num_parts = tl.load(row_parts + row * 2)
    slot = tl.load(row_parts + row * 2 + 1)
    if num_parts > 1:
        _join_parts(
            partial,
            partial_lse,
            out + row.to(tl.int64) * out_row_stride,
            out_head_stride,
            slot,
            num_parts,
            tl.program_id(1),
            sinks,
            kv_heads,
            group,
            head_dim,
            padded_dim,
            tile_rows,
            join_chunk,
            tile,
        )


@triton.jit
def _join_parts(
    partial,
    partial_lse,
    out_row,
    out_head_stride,
    slot,
    num_parts,
    head_tile,
    sinks,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    join_chunk: tl.constexpr,
    tile: tl.constexpr,
):
    """Merges all parts of a row, for one tile of heads."""
    tiles_a_head: tl.constexpr = (group + tile - 1) // tile
    member = (head_tile % tiles_a_head) * tile + tl.arange(0, tile_rows)
    head = (head_tile // tiles_a_head) * group + member
    dim = tl.arange(0, padded_dim)
    held = (member < group)[:, None] & (dim < head_dim)[None, :]
    peak = tl.full([tile_rows], _LOWEST, tl.float32)
    weight = tl.zeros([tile_rows], tl.float32)
    mean = tl.zeros([tile_rows, padded_dim], tl.float32)
    for base in range(0, num_parts, join_chunk):
        part = base + tl.arange(0, join_chunk)
        line = (slot + part).to(tl.int64)[:, None] * (kv_heads * group) + head[None, :]
        here = (part < num_parts)[:, None] & (member < group)[None, :]
        # Bypasses the L1 cache, which does not see other multiprocessors' writes.
        lse = tl.load(partial_lse + line, mask=here, other=float("-inf"), cache_modifier=".cg")
        there = partial + line[:, :, None] * head_dim + dim[None, None, :]
        means = tl.load(there, mask=here[:, :, None] & held[None, :, :], other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        share = tl.exp2(lse - new_peak[None, :])
        fade = tl.exp2(peak - new_peak)
        weight = weight * fade + tl.sum(share, axis=0)
        mean = mean * fade[:, None] + tl.sum(means * share[:, :, None], axis=0)
        peak = new_peak
    weight = with_sinks(weight, peak, sinks, head, member < group)
    mean = mean / tl.where(weight > 0, weight, 1.0)[:, None]
    to = out_row + head[:, None] * out_head_stride + dim[None, :]
    tl.store(to, mean.to(out_row.dtype.element_ty), mask=held)

"""Decode attention to prefixes that rows share: keys and values that many rows begin with are read once for a tile of
queries, instead of once per row.

    group of 3 rows, 2 heads per KV head, tile of 4 queries
    queries    a0 a1 b0 b1 | c0 c1 .. ..        each tile against each part of the prefix, for one KV head

`decode_attention` plans the work, and merges the partial results from here, one per row and part, with the rows' own
parts. Knows pages, rows and heads; knows no sequences and no models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.pages import operand, page_of, scaled, within_page
from ostro.models.architecture import AttentionSpec

# Arrays that describe groups. By row: its group, or -1.
GROUP_OF = 0
# The groups' rows, one group after the other.
GROUP_ROWS = 1
# By group: the keys that its rows share, and the end of its rows in the array before.
GROUP_KEYS = 2
GROUP_END = 3
GROUP_ARRAYS = 4

# Fields of the work list: the start of the group's rows in their array, and their number; tile, first key, end of keys,
# part.
ITEM_FIELDS = 8
_FIELDS = tl.constexpr(ITEM_FIELDS)
_GROUP_ROWS = tl.constexpr(GROUP_ROWS)
_LOWEST = tl.constexpr(-1.0e30)
# Shared memory per multiprocessor, minus the compiler's own share.
_SHARED_MEMORY = 225 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTuning:
    """Parameters that affect speed but, except for the order of sums, not the result."""

    queries: int = 64
    """Queries per tile, counting each head."""
    warps: int = 4
    buffers: int = 2
    """Blocks of keys and values buffered per program."""
    programs_per_sm: int = 2
    """How finely to split prefixes: tiles times parts times KV heads, per multiprocessor."""


def prefix_tuning_for(dtype: torch.dtype, head_dim: int) -> PrefixTuning:
    warps = 4 if head_dim <= 128 else 8
    # Exact fp32 matmuls do not run on tensor cores, and a tile must fit in registers.
    if dtype.itemsize > 2 or head_dim > 256:
        return PrefixTuning(queries=16, warps=warps, buffers=1)
    return PrefixTuning(warps=warps)


class PrefixScratch:
    """The work list for up to `max_rows` rows in groups of two rows or more."""

    def __init__(
        self, max_rows: int, group: int, kv_heads: int, processors: int, device: torch.device, tuning: PrefixTuning
    ) -> None:
        """`group` query heads share a KV head."""
        self.tuning = tuning
        self.target = max(1, processors * tuning.programs_per_sm // kv_heads)
        # Parts are at least total / target blocks long, where the total counts the blocks of each tile.
        capacity = triton.cdiv(max_rows * group, tuning.queries) + max_rows // 2 + self.target
        self.slots = max_rows + triton.cdiv(tuning.queries * self.target, group)
        """The most partial results of all rows together."""
        # All of them fit at once, so that the next kernel can start beside them.
        self.programs = min(capacity * kv_heads, processors * tuning.programs_per_sm)
        self.items = torch.zeros(capacity, ITEM_FIELDS, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)


def group_arrays(groups: Sequence[tuple[Sequence[int], int]], most: int, block: int) -> npt.NDArray[np.int32]:
    """int32 [GROUP_ARRAYS, most]: what the device reads about groups, each given as its rows and the keys they share.

    Each has at least two rows, no row is in two of them, and all the keys are computed. Whole blocks of keys count.
    """
    arrays = np.zeros((GROUP_ARRAYS, most), dtype=np.int32)
    arrays[GROUP_OF] = -1
    end = 0
    for number, (rows, keys) in enumerate(groups):
        assert len(rows) > 1
        arrays[GROUP_OF, rows] = number
        arrays[GROUP_ROWS, end : end + len(rows)] = rows
        end += len(rows)
        arrays[GROUP_KEYS, number] = keys // block * block
        arrays[GROUP_END, number] = end
    return arrays


def prefix_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    groups: Tensor,
    row_parts: Tensor,
    scratch: PrefixScratch,
    partial: Tensor,
    partial_lse: Tensor,
    spec: AttentionSpec,
    *,
    block: int,
    pdl: bool = False,
    leads: bool = False,
) -> None:
    """Attends the rows of all groups to their prefixes, as planned, and writes partial results.

    For shapes and `pdl` see `decode_attention`; a row's parts are put at its slot in `row_parts`. With `leads`, the
    next kernel may start when everything before this one has ended.
    """
    assert spec.window is None
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    padded_dim = triton.next_power_of_2(head_dim)
    tuning = scratch.tuning
    # The queries take shared memory too, and so does one more buffer that the tensor cores are still reading.
    vectors = _SHARED_MEMORY // (padded_dim * q.element_size()) - tuning.queries
    buffers = max(1, min(tuning.buffers, vectors // (2 * block) - 1))
    _prefix_kernel[(scratch.programs,)](
        q,
        keys,
        values,
        tables,
        scratch.items,
        scratch.count,
        groups,
        groups.stride(0),
        row_parts,
        partial,
        partial_lse,
        spec.scale,
        spec.softcap or 0.0,
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        values.stride(0),
        tables.stride(0),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        padded_dim=padded_dim,
        tile=tuning.queries,
        page_size=page_size,
        block=block,
        capped=spec.softcap is not None,
        # Two dependent loads, page number and keys, share the stages equally.
        stages=2 * buffers + 1,
        pdl=pdl,
        leads=leads,
        num_warps=tuning.warps,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["groups_stride"])
def _prefix_kernel(
    q,
    keys,
    values,
    tables,
    items,
    count,
    groups,
    groups_stride,
    row_parts,
    partial,
    partial_lse,
    scale,
    softcap,
    q_row_stride,
    q_head_stride,
    key_page_stride,
    value_page_stride,
    table_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    capped: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
    leads: tl.constexpr,
):
    if pdl:
        gdc_wait()
    if leads:
        gdc_launch_dependents()
    total = tl.load(count) * kv_heads
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        item = items + (work // kv_heads) * _FIELDS
        kv_head = work % kv_heads
        members = groups + _GROUP_ROWS * groups_stride + tl.load(item)
        num_rows = tl.load(item + 1)
        first = tl.load(item + 3)
        end = tl.load(item + 4)
        part = tl.load(item + 5)

        index = tl.load(item + 2) * tile + tl.arange(0, tile)
        there = index < num_rows * group
        row = tl.load(members + index // group, mask=there, other=0)
        slot = tl.load(row_parts + row * 2 + 1, mask=there, other=0)
        head = kv_head * group + index % group
        dim = tl.arange(0, padded_dim)
        held = there[:, None] & (dim < head_dim)[None, :]
        at = q + row.to(tl.int64)[:, None] * q_row_stride + head[:, None] * q_head_stride + dim[None, :]
        query = operand(tl.load(at, mask=held, other=0.0), keys)

        peak = tl.full([tile], _LOWEST, tl.float32)
        weight = tl.zeros([tile], tl.float32)
        mean = tl.zeros([tile, padded_dim], tl.float32)
        # Any member's pages will do.
        table = tables + tl.load(members).to(tl.int64) * table_stride
        for base in tl.range(first, end, block, num_stages=stages):
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
            score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee")
            score = scaled(score, scale, softcap, capped)
            new_peak = tl.maximum(peak, tl.max(score, axis=1))
            chance = tl.exp2(score - new_peak[:, None])
            fade = tl.exp2(peak - new_peak)
            weight = weight * fade + tl.sum(chance, axis=1)
            v = v.to(query.dtype)
            mean = tl.dot(chance.to(v.dtype), v, mean * fade[:, None], input_precision="ieee")
            peak = new_peak

        mean = mean / tl.where(weight > 0, weight, 1.0)[:, None]
        line = (slot + part).to(tl.int64) * (kv_heads * group) + head
        tl.store(partial + line[:, None] * head_dim + dim[None, :], mean, mask=held)
        tl.store(partial_lse + line, peak + tl.log2(weight), mask=there)

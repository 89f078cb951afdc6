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
from torch import Tensor

from ostro.kernels.gpu.prefill_attention import PrefillTuning
from ostro.kernels.gpu.tile_attention import attend_tile
from ostro.models.architecture import AttentionSpec


def invariant_tuning(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> PrefillTuning:
    """One tuning for all tiles of a model: a compromise between single tokens and prompts."""
    least = triton.next_power_of_2(heads // kv_heads)
    if dtype.itemsize <= 2:
        return PrefillTuning(rows=max(64, least), block=64, buffers=2 if head_dim <= 128 else 1, warps=4)
    # Exact fp32 matmuls do not run on tensor cores, and a tile must fit in registers.
    return PrefillTuning(rows=max(32, least), block=32, buffers=1, warps=4)


def single_tiles(positions: Tensor, lens: Tensor) -> Tensor:
    """One tile per row for a step of single tokens, int32 [rows, 4]; a row of length 0 gets a tile without tokens."""
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends the tokens of the tiles, each to its sequence up to itself; fills those rows of `out` and returns it.

    q and out are [tokens, heads, head_dim], keys and values [pages, kv_heads, page_size, head_dim], tiles int32
    [tiles, 4] from `single_tiles` or `prefill_tiles`, with at most `tokens_in_tile` tokens each. Sinks are [heads]: see
    `architecture.Sinks`.
    """
    _, kv_heads, page_size, head_dim = keys.shape
    attend_tile[(kv_heads, tiles.shape[0])](
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
        sinks,
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

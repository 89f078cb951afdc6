"""Which experts each row of a mixture goes through, and which rows each expert has, decided on the device.

    logits [rows, experts] ── route ──> experts and weights of each row, by falling logit
                                          │
                            by_expert ────┴──> slots: a number per row and chosen expert, sorted by expert
                                               tiles: up to `height` slots of one expert each

A row's slots are `row * chosen + rank`. No number of tiles is known to the host, which launches kernels for the most
that there may be (`most_tiles`): those beyond the device's count have nothing to do.

An expert's rank is the number of experts before it: comparing all pairs takes one pass, where choosing one expert after
another would take as many as are chosen. The plain twin is `torch_models.experts.route`, with torch's own stable sort.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.tilings import power_of_two

COMPARED = 32
"""Experts that all others are compared with at a time."""
TILE_FIELDS = 3
"""Of a tile: its expert, its first slot, counted in the order of experts, and the end of the expert's slots."""
INVARIANT_HEIGHT = 64
"""Of tiles whose results must not depend on how many rows there are."""
_SHORTEST, _TALLEST = 16, 128
# Slots read at a time, and by how many warps: for decode steps, and for prompts.
_FEW_SLOTS, _MANY_SLOTS = (1024, 4), (4096, 8)


class Routed(NamedTuple):
    experts: Tensor
    """[rows, chosen], int32."""
    weights: Tensor
    """[rows, chosen], float32."""


class RowTiles(NamedTuple):
    """Slots by expert."""

    slots: Tensor
    """[rows * chosen], int32: sorted by expert, and within one in order."""
    tiles: Tensor
    """int32: the number of tiles, then each tile's TILE_FIELDS."""
    height: int
    most: int
    """Tiles that there may be."""


def tile_height(slots: int, experts: int) -> int:
    """Rows of a tile: twice as many as experts have on average, so that few need a second tile."""
    return max(_SHORTEST, min(_TALLEST, power_of_two(max(1, 2 * slots // experts))))


def most_tiles(slots: int, experts: int, height: int) -> int:
    """No expert has more than one tile that is not full."""
    return min(slots, experts + slots // height)


def empty_tiles(device: torch.device, slots: int, experts: int, height: int) -> RowTiles:
    """No tiles."""
    most = most_tiles(slots, experts, height)
    tiles = torch.zeros(1 + TILE_FIELDS * most, dtype=torch.int32, device=device)
    return RowTiles(torch.zeros(slots, dtype=torch.int32, device=device), tiles, height, most)


def route(logits: Tensor, count: int, chosen: int, *, normalized: bool, pdl: bool = False) -> Routed:
    """For the first `count` logits of each row. The weights are the softmax of the chosen ones' logits if `normalized`,
    else their part of the softmax over all.
    """
    rows = len(logits)
    assert chosen <= count <= logits.shape[1]
    experts = torch.empty(rows, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
    _route_kernel[(rows,)](
        logits,
        experts,
        weights,
        logits.stride(0),
        count=count,
        chosen=chosen,
        normalized=normalized,
        block=max(COMPARED, power_of_two(count)),
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return Routed(experts, weights)


def by_expert(experts: Tensor, count: int, height: int, *, pdl: bool = False) -> RowTiles:
    number = experts.numel()
    most = most_tiles(number, count, height)
    slots = torch.empty(number, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(1 + TILE_FIELDS * most, dtype=torch.int32, device=experts.device)
    block, warps = _FEW_SLOTS if number <= 2 * _FEW_SLOTS[0] else _MANY_SLOTS
    _by_expert_kernel[(count,)](
        experts,
        slots,
        tiles,
        number,
        count=count,
        bins=power_of_two(count),
        height=height,
        block=block,
        pdl=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return RowTiles(slots, tiles, height, most)


@triton.jit
def _route_kernel(
    logits: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    stride: tl.tensor,
    count: tl.constexpr,
    chosen: tl.constexpr,
    normalized: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    ranks, shares = ranked(logits + row * stride, count, chosen, normalized, block)
    at = row * chosen + ranks
    tl.store(experts + at, expert, mask=ranks < chosen)
    tl.store(weights + at, shares, mask=ranks < chosen)


@triton.jit
def ranked(
    logits: tl.tensor, count: tl.constexpr, chosen: tl.constexpr, normalized: tl.constexpr, block: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """For each expert of one row, how many have a higher logit, or the same and a lower number; and, of the chosen
    ones, the weight.
    """
    expert = tl.arange(0, block)
    own = _load_logits(logits, expert, count)
    # Of 32 others at a time, which come before it; counted at the end.
    found = tl.zeros([32, block], tl.int32)
    if block <= 128:
        # All loads are on their way before the first comparison.
        loaded = ()  # type: tuple[tl.tensor, ...]
        for part in tl.static_range(block // 32):
            loaded += (_load_logits(logits, part * 32 + tl.arange(0, 32), count),)
        for part in tl.static_range(block // 32):
            found += _ahead(own, expert, loaded[part], part * 32 + tl.arange(0, 32), count)
    else:
        for start in range(0, count, 32):
            other = start + tl.arange(0, 32)
            found += _ahead(own, expert, _load_logits(logits, other, count), other, count)
    ranks = tl.where(expert < count, tl.sum(found, 0), block)
    among = ranks < (chosen if normalized else count)
    shares = tl.where(among, tl.exp(own - tl.max(own, 0)), 0.0)
    return ranks, shares / tl.sum(shares, 0)


@triton.jit
def of_ranks(values: tl.tensor, ranks: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """The values of the first experts by rank, as many as `block`."""
    own = ranks[None, :] == tl.arange(0, block)[:, None]
    return tl.sum(tl.where(own, values[None, :], 0), 1)


@triton.jit
def element(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def _ahead(own: tl.tensor, expert: tl.tensor, theirs: tl.tensor, other: tl.tensor, count: tl.constexpr) -> tl.tensor:
    """[others, experts]: one where the other comes before."""
    theirs, other = theirs[:, None], other[:, None]
    first = (theirs == own[None, :]) & (other < expert[None, :])
    return (((theirs > own[None, :]) | first) & (other < count)).to(tl.int32)


@triton.jit
def _load_logits(at: tl.tensor, expert: tl.tensor, count: tl.constexpr) -> tl.tensor:
    # Past the L1 cache, which may hold an earlier layer's: a kernel may read these before it waits.
    logits = tl.load(at + expert, mask=expert < count, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    # What is not a number compares with nothing, and would leave two experts with one rank.
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit(do_not_specialize=["number"])
def _by_expert_kernel(
    experts: tl.tensor,
    slots: tl.tensor,
    tiles: tl.tensor,
    number: tl.tensor,
    count: tl.constexpr,
    bins: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """A program lists the slots of one expert. All count the slots of all experts, to know where to begin."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0)
    counts = tl.zeros([bins], tl.int32)
    for start in range(0, number, block):
        slot = start + tl.arange(0, block)
        chosen = tl.load(experts + slot, mask=slot < number, other=0)
        counts += tl.histogram(chosen, bins, mask=slot < number)
    expert = tl.arange(0, bins)
    of_each = (counts + (height - 1)) // height
    first = tl.sum(tl.where(expert < own, counts, 0), 0)
    end = first + tl.sum(tl.where(expert == own, counts, 0), 0)
    tile = tl.sum(tl.where(expert < own, of_each, 0), 0)
    if own == count - 1:
        tl.store(tiles, tl.sum(of_each, 0))
    at = tiles + 1 + tile * 3
    for start in range(first, end, height):
        tl.store(at, own)
        tl.store(at + 1, start)
        tl.store(at + 2, end)
        at += 3
    for start in range(0, number, block):
        slot = start + tl.arange(0, block)
        mine = tl.load(experts + slot, mask=slot < number, other=-1) == own
        place = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(slots + first + place - 1, slot, mask=mine)
        first += tl.sum(mine.to(tl.int32), 0)

"""Which experts each row of a mixture goes through, and which rows each expert has, decided on the device.

    logits [rows, experts] ── route ──> experts and weights of each row, by falling logit
                                          │
                            by_expert ────┴──> slots: a number per row and chosen expert, sorted by expert
                                               tiles: up to `height` slots of one expert each

A row's slots are `row * chosen + rank`. The host does not know the number of tiles and launches kernels for the most
that there can be (`most_tiles`): programs beyond the device's count have nothing to do.

The plain twin is `torch_models.experts.route`, with torch's own stable sort.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostro.kernels.gpu.mixture_limits import MOST_CHOSEN, MOST_EXPERTS
from ostro.kernels.gpu.tilings import power_of_two

TILE_FIELDS = 3
"""Fields per tile: its expert, its first slot, counted in the order of experts, and the end of the expert's slots."""
INVARIANT_HEIGHT = 64
"""The height of tiles whose results must not depend on the number of rows."""
_SHORTEST, _TALLEST = 16, 128
# For up to this many slots: how many are read at a time, and by how many warps.
_SLOTS_READ = ((2048, 1024, 4), (32768, 4096, 8), (math.inf, 16384, 16))


class Routed(NamedTuple):
    experts: Tensor
    """[rows, chosen], int32."""
    weights: Tensor
    """[rows, chosen], float32."""


class RowTiles(NamedTuple):
    """Slots sorted by expert, in tiles."""

    slots: Tensor
    """[rows * chosen], int32: sorted by expert, and within one in order."""
    tiles: Tensor
    """int32: the number of tiles, then each tile's TILE_FIELDS."""
    height: int
    most: int
    """The most tiles that there can be."""


def tile_height(slots: int, experts: int) -> int:
    """Rows per tile: twice the average per expert, so that few experts need a second tile."""
    return max(_SHORTEST, min(_TALLEST, power_of_two(max(1, 2 * slots // experts))))


def most_tiles(slots: int, experts: int, height: int) -> int:
    """The most tiles that there can be: each expert has at most one that is not full."""
    return min(slots, experts + slots // height)


def empty_tiles(device: torch.device, slots: int, experts: int, height: int) -> RowTiles:
    """A list without tiles."""
    most = most_tiles(slots, experts, height)
    tiles = torch.zeros(1 + TILE_FIELDS * most, dtype=torch.int32, device=device)
    return RowTiles(torch.zeros(slots, dtype=torch.int32, device=device), tiles, height, most)


def route(logits: Tensor, count: int, chosen: int, *, normalized: bool, pdl: bool = False) -> Routed:
    """For the first `count` logits of each row. The weights are the softmax of the chosen ones' logits if `normalized`,
    else their part of the softmax over all.
    """
    rows = len(logits)
    assert chosen <= count <= logits.shape[1]
    assert count <= MOST_EXPERTS
    assert chosen <= MOST_CHOSEN
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
        block=power_of_two(count),
        pdl=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return Routed(experts, weights)


def by_expert(experts: Tensor, count: int, height: int, *, pdl: bool = False) -> RowTiles:
    number = experts.numel()
    most = most_tiles(number, count, height)
    slots = torch.empty(number, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(1 + TILE_FIELDS * most, dtype=torch.int32, device=experts.device)
    block, warps = next((block, warps) for most_slots, block, warps in _SLOTS_READ if number <= most_slots)
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
    found, shares = choose(logits + row * stride, count, chosen, normalized, block, 1)
    at = row * chosen + tl.arange(0, 1)
    for rank in tl.static_range(chosen):
        tl.store(experts + at + rank, found[rank])
        tl.store(weights + at + rank, shares[rank])


@triton.jit
def choose(
    logits: tl.tensor,
    count: tl.constexpr,
    chosen: tl.constexpr,
    normalized: tl.constexpr,
    block: tl.constexpr,
    copies: tl.constexpr,
) -> tuple[tuple[tl.tensor, ...], tuple[tl.tensor, ...]]:
    """The experts of one row, by falling logit, and their weights, each repeated `copies` times."""
    keys = load_keys(logits, count, block, copies)
    experts = ()  # type: tuple[tl.tensor, ...]
    values = ()  # type: tuple[tl.tensor, ...]
    best = tl.max(keys, 1)
    highest = _logit_of(best)
    total = tl.zeros([copies], tl.float32)
    if not normalized:
        own = tl.where((tl.arange(0, block) < count)[None, :], _logit_of(keys), float("-inf"))
        total = tl.sum(tl.exp(own - highest[:, None]), 1)
    for rank in tl.static_range(chosen):
        if rank > 0:
            keys = without(keys, best)
            best = tl.max(keys, 1)
        value = tl.exp(_logit_of(best) - highest)
        experts += (expert_of(best),)
        values += (value,)
        if normalized:
            total += value
    shares = ()  # type: tuple[tl.tensor, ...]
    for rank in tl.static_range(chosen):
        shares += (values[rank] / total,)
    return experts, shares


@triton.jit
def load_keys(logits: tl.tensor, count: tl.constexpr, block: tl.constexpr, copies: tl.constexpr) -> tl.tensor:
    """A row's logits as distinct integers in the same order, with the experts' numbers in them: among equal logits, the
    first expert's is highest. Finding the highest integer is one instruction for a warp, unlike for pairs of numbers. A
    warp with its own copy of [copies, experts] need not wait for others.
    """
    expert = tl.arange(0, block)[None, :]
    at = tl.broadcast_to(logits + expert, [copies, block])
    # Bypasses the L1 cache, which may hold an earlier layer's logits: a kernel may read these before it waits.
    value = tl.load(at, mask=expert < count, other=0.0, cache_modifier=".cg").to(tl.float32)
    # NaN ranks above everything; both zeros are equal.
    bits = tl.where(value == value, value + 0.0, float("nan")).to(tl.int32, bitcast=True)
    ordered = _reordered(bits)
    if logits.dtype.element_ty.primitive_bitwidth <= 16:
        # The last 13 bits are free.
        keys = (ordered & -8192) | (8191 - expert)
    else:
        keys = (ordered.to(tl.int64) << 13) | (8191 - expert)
    return tl.where(expert < count, keys, _lowest(keys))


@triton.jit
def without(keys: tl.tensor, best: tl.tensor) -> tl.tensor:
    return tl.where(keys == best[:, None], _lowest(keys), keys)


@triton.jit
def expert_of(key: tl.tensor) -> tl.tensor:
    return (8191 - (key & 8191)).to(tl.int32)


@triton.jit
def _logit_of(key: tl.tensor) -> tl.tensor:
    # 16-bit logits leave their low bits to the expert's number.
    ordered = key & -8192 if key.dtype == tl.int32 else (key >> 13).to(tl.int32)
    bits = _reordered(ordered)
    if key.dtype == tl.int32:
        bits &= -8192
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reordered(bits: tl.tensor) -> tl.tensor:
    """Maps a float's bits to an integer that sorts like the float, and back: the bits of negative floats grow as their
    values fall.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _lowest(keys: tl.tensor) -> tl.tensor:
    if keys.dtype == tl.int32:
        lowest = tl.full(keys.shape, -2147483648, tl.int32)
    else:
        lowest = tl.full(keys.shape, -9223372036854775808, tl.int64)
    return lowest


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

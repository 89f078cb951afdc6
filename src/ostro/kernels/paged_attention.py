"""Attention over the paged KV cache, in torch: a plain reference, and a path that reads the pages in place.

A page is `page_size` consecutive slots of the cache (`KVCache`), so consecutive pages form one run, which attention
reads as a strided view, without a copy. A sequence with several runs attends to each and merges the results by their
log-sum-exps:

    pages  [ 4  5  6 | 31 32 ]      runs  slots 64…112 and 496…528
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ostro.kernels.decode_attention import DecodePlan, Partial, SlotRun, flash, joined, with_sinks
from ostro.kernels.plain_attention_memory import BLOCK_BYTES, queries_at_once
from ostro.kernels.recurrent_state import StepStates
from ostro.models.architecture import AttentionSpec


class Cell(NamedTuple):
    """A layer's place: a stack, and the number of the layer there."""

    stack: int
    number: int


class KVCache:
    """Keys and values of all layers. Knows slots; knows no pages and no sequences.

    Layers with the same heads are in one tensor, a stack, [layers, key or value, kv_heads, slots, head_dim]. Most
    models have one stack; a layer that reads another's keys and values is in none.
    """

    def __init__(self, stacks: Sequence[Tensor], cells: Sequence[Cell | None]) -> None:
        self.stacks, self._cells = stacks, cells

    @classmethod
    def of_heads(
        cls, heads: Sequence[tuple[int, int]], slots: int, allocate: Callable[[tuple[int, ...]], Tensor]
    ) -> Self:
        """`heads` are each layer's number of KV heads, 0 if it has none of its own, and their width."""
        kinds = [kind for kind in dict.fromkeys(heads) if kind[0]]
        layers = Counter[tuple[int, int]]()
        cells: list[Cell | None] = []
        for kind in heads:
            cells.append(Cell(kinds.index(kind), layers[kind]) if kind in kinds else None)
            layers[kind] += 1
        return cls([allocate((layers[kind], 2, kind[0], slots, kind[1])) for kind in kinds], cells)

    @classmethod
    def of(cls, stack: Tensor) -> Self:
        """A cache whose layers all have the same heads."""
        return cls([stack], [Cell(0, index) for index in range(len(stack))])

    @property
    def device_type(self) -> str:
        return self.stacks[0].device.type

    def cell(self, layer: int) -> Cell:
        cell = self._cells[layer]
        assert cell is not None, "the layer has keys and values of its own"
        return cell

    def layer(self, layer: int) -> Tensor:
        """[key or value, kv_heads, slots, head_dim]"""
        stack, number = self.cell(layer)
        return self.stacks[stack][number]

    def __iter__(self) -> Iterator[Tensor]:
        return (self.layer(layer) for layer, cell in enumerate(self._cells) if cell is not None)

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies `size` slots in all layers."""
        for stack in self.stacks:
            stack[..., target : target + size, :] = stack[..., source : source + size, :]


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence's tokens in this step: `length` queries from position `start`, at `offset` in the flat batch."""

    offset: int
    start: int
    length: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.length


def runs(pages: Sequence[int], page_size: int, first: int, end: int) -> list[tuple[int, int]]:
    """The slots of positions `first` to `end` as maximal contiguous ranges."""
    found: list[tuple[int, int]] = []
    for index in range(first // page_size, -(-end // page_size)):
        low = pages[index] * page_size + max(first - index * page_size, 0)
        high = pages[index] * page_size + min(end - index * page_size, page_size)
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def slots_of(pieces: Sequence[Piece], page_size: int) -> list[int]:
    """The slot where each token of the step stores its key and value."""
    return [
        slot
        for piece in pieces
        for low, high in runs(piece.pages, page_size, piece.start, piece.end)
        for slot in range(low, high)
    ]


class PagedAttention:
    """One step's attention context: stores new keys and values, attends through views of the cache.

    `masks` allows faster groupings that are exact only if all values in the cache are finite. `states` are for layers
    that keep such instead of keys and values.
    """

    def __init__(
        self,
        cache: KVCache,
        pieces: Sequence[Piece],
        page_size: int,
        *,
        masks: bool = True,
        states: StepStates | None = None,
    ) -> None:
        self.cache = cache
        self.pieces = pieces
        self.page_size = page_size
        self.masks = masks
        self.states = states
        device = cache.stacks[0].device
        self.slots = torch.tensor(slots_of(pieces, page_size), device=device)
        self._single = [piece for piece in pieces if piece.length == 1]
        self._several = [piece for piece in pieces if piece.length > 1]
        self._single_rows = torch.tensor([piece.offset for piece in self._single], device=device)
        self._found: dict[tuple[int, int], Tensor] = {}
        # By stack, window and chunk, because these may differ between layers.
        self._plans: dict[tuple[int, int | None, int | None], DecodePlan] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        self.store(layer, k, v)
        return self._attend(layer, q, k, v, spec, sinks)

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        k, v = self.cache.layer(layer)[:, :, self.slots].transpose(1, 2)
        return self._attend(layer, q, k, v, spec, None)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        # Query heads that share a KV head are adjacent.
        q = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        if spec.softcap is not None or self.cache.device_type != "cpu":
            parts = [reference_attention(self, layer, q, piece, spec, sinks) for piece in self.pieces]
            return torch.cat(parts).flatten(1)
        if not self._several:
            return self._decode(layer, q, spec, sinks).flatten(1)
        out = q.new_empty(q.shape)
        if self._single:
            out[self._single_rows] = self._decode(layer, q[self._single_rows], spec, sinks)
        for piece in self._several:
            out[piece.offset : piece.offset + piece.length] = self._prefill(layer, q, k, v, piece, spec, sinks)
        return out.flatten(1)

    def slots_from(self, piece: Piece, first: int) -> Tensor:
        """The slots of a sequence's positions from `first` on: found once for all layers."""
        key = piece.offset, first
        if key not in self._found:
            found = runs(piece.pages, self.page_size, first, piece.end)
            self._found[key] = torch.tensor([slot for own in found for slot in range(*own)], device=self.slots.device)
        return self._found[key]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self.cache.layer(layer)
        keys.index_copy_(1, self.slots, k.transpose(0, 1))
        values.index_copy_(1, self.slots, v.transpose(0, 1))

    def _decode(self, layer: int, q: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        """Single tokens, which see all of their sequence, window or chunk: causality needs no mask."""
        stack, index = self.cache.cell(layer)
        key = stack, spec.window, spec.chunk
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(self.cache.stacks[stack], spec)
        part = plan.attend(index, q, spec.scale)
        return part[0] if sinks is None else with_sinks(part, sinks.view(q.shape[1:3]))

    def _plan(self, stack: Tensor, spec: AttentionSpec) -> DecodePlan:
        found = [
            SlotRun(low, high, row)
            for row, piece in enumerate(self._single)
            for low, high in runs(piece.pages, self.page_size, spec.first(piece.start), piece.end)
        ]
        return DecodePlan(stack, found, len(self._single), masks=self.masks)

    def _prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, piece: Piece, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """Several tokens, which see everything before them through views, and each other causally."""
        if spec.first(piece.end - 1) > 0:
            return reference_attention(self, layer, q, piece, spec, sinks)
        rows = slice(piece.offset, piece.offset + piece.length)
        queries, keys, values = (each[rows].transpose(0, 1).unsqueeze(0) for each in (q.flatten(1, 2), k, v))
        cached = self.cache.layer(layer).unsqueeze(1)
        parts = [
            flash(queries, cached[0][:, :, low:high], cached[1][:, :, low:high], spec.scale)
            for low, high in runs(piece.pages, self.page_size, 0, piece.start)
        ]
        parts.append(flash(queries, keys, values, spec.scale, causal=True))
        whole = _join(parts)
        out = whole[0] if sinks is None else with_sinks(whole, sinks[:, None])
        return out[0].transpose(0, 1).reshape(piece.length, *q.shape[1:])


def reference_attention(
    ctx: PagedAttention,
    layer: int,
    q: Tensor,
    piece: Piece,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """The plain twin: gathers the sequence's keys and values, masks, and applies the formula, for as many queries at a
    time as `block_bytes` has room for.

    Also handles what the fast path cannot: devices other than CPUs, soft-capped scores, and windows or chunks shorter
    than the prompt.
    q and the result are [tokens, kv_heads, group, head_dim].
    """
    first = spec.first(piece.start)
    keys, values = ctx.cache.layer(layer)[:, :, ctx.slots_from(piece, first)].unbind(0)
    parts, start = [], piece.start
    while start < piece.end:
        low = spec.first(start)
        end = min(piece.end, start + queries_at_once(q.shape[1] * q.shape[2], start - low, block_bytes))
        offset, seen = piece.offset - piece.start, slice(low - first, end - first)
        parts.append(_block(q[offset + start : offset + end], keys[:, seen], values[:, seen], start, low, spec, sinks))
        start = end
    return torch.cat(parts)


def _block(
    q: Tensor, keys: Tensor, values: Tensor, start: int, low: int, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Queries from position `start` on attend to keys [kv_heads, keys, head_dim] from position `low` on."""
    kv_heads, group, tokens = q.shape[1], q.shape[2], q.shape[0]
    # Heads that share keys are rows of one product, so that no keys are copied per head.
    queries = q.permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, -1)
    scores = (queries @ keys.transpose(-1, -2)).float().view(kv_heads, group, tokens, -1).mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    at = torch.arange(start, start + tokens, device=q.device)[:, None]
    of = torch.arange(low, low + keys.shape[1], device=q.device)
    hidden = of > at
    if spec.window is not None:
        hidden |= of <= at - spec.window
    if spec.chunk is not None:
        hidden |= of < at - at % spec.chunk
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(kv_heads, group, tokens, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : len(of)].to(values.dtype).reshape(kv_heads, group * tokens, -1)
    return (weights @ values).view(kv_heads, group, tokens, -1).permute(2, 0, 1, 3)


def _join(parts: list[Partial]) -> Partial:
    """Attention to all parts' keys together."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return joined(torch.stack(outs), torch.stack(lses), 0)

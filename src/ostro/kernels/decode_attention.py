"""Decode attention in torch: one query per sequence, in as few calls as the page layout allows. Knows only slot runs.

A call costs as much as the arithmetic of a short sequence. But one strided view can cover several runs of slots if
their starts are equally spaced, as they are if sequences were allocated equal space, or if they share a run:

    slots    A A A A . . B B B . . . C C C C C .      one view of three rows, six slots apart
    mask     0 0 0 0 ∞   0 0 0 ∞ ∞   0 0 0 0 0        slots beyond a row's end are masked

So runs are grouped into such views, and the results of a sequence with several runs are merged by their log-sum-exps.
Masked slots contain stale values, which must be finite: an infinity or NaN shows through a mask. A caller that cannot
guarantee that forbids masks, and then only runs of equal length are grouped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Attention to some of the keys: [rows, heads, queries, head_dim], and its log-sum-exp, [rows, heads, queries].
Partial = tuple[Tensor, Tensor]


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> Partial:
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def joined(outs: Tensor, lses: Tensor, dim: int) -> Partial:
    """Attention to the keys of all parts along this dimension together. Overwrites `outs`."""
    return outs.mul_(lses.softmax(dim)[..., None]).sum(dim), lses.logsumexp(dim)


def with_sinks(part: Partial, sinks: Tensor) -> Tensor:
    """Attention to these keys and to the sinks, which broadcast to the log-sum-exps: a sink has no value, so that it
    only takes its share. Overwrites the part.
    """
    out, lse = part
    return out.mul_(torch.sigmoid(lse - sinks)[..., None])


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Cache slots `low` to `high`, for the token in row `row`."""

    low: int
    high: int
    row: int

    @property
    def length(self) -> int:
        return self.high - self.low


def equally_spaced(runs: Sequence[SlotRun], num_slots: int, *, masks: bool) -> list[list[SlotRun]]:
    """Groups runs that one view can cover without much waste and without reaching into the next row."""
    groups: list[list[SlotRun]] = []
    for run in sorted(runs, key=lambda run: (run.low, run.high)):
        if not groups or not _fits(groups[-1], run, num_slots, masks=masks):
            groups.append([])
        groups[-1].append(run)
    return groups


def _fits(group: list[SlotRun], run: SlotRun, num_slots: int, *, masks: bool) -> bool:
    stride = run.low - group[-1].low
    if len(group) > 1 and stride != group[1].low - group[0].low:
        return False
    if stride == 0 or not masks:
        return run.length == group[-1].length and (stride == 0 or run.length <= stride)
    width = max(run.length, *(each.length for each in group))
    used = run.length + sum(each.length for each in group)
    return width <= stride and run.low + width <= num_slots and width * (len(group) + 1) <= 2 * used


class DecodePlan:
    """One step's decode tokens and the views of their keys, built once for all layers."""

    def __init__(self, cache: Tensor, runs: Sequence[SlotRun], num_rows: int, *, masks: bool) -> None:
        groups = equally_spaced(runs, cache.shape[3], masks=masks)
        self._groups = [_Group(cache, group) for group in groups]
        self._order = _order([run.row for group in groups for run in group], num_rows, cache.device)

    def attend(self, layer: int, q: Tensor, scale: float) -> Partial:
        """q is [rows, kv_heads, group, head_dim]: query heads that share a KV head read it once."""
        parts = [group.attend(layer, q, scale) for group in self._groups]
        if self._order is None and len(parts) == 1:
            return parts[0]
        outs, lses = (torch.cat(each) for each in zip(*parts, strict=True))
        if self._order is None:
            return outs, lses
        if self._order.dim() == 1:
            return outs[self._order], lses[self._order]
        # Rows with fewer runs than others are padded with a part of weight zero.
        outs = torch.cat((outs, torch.zeros_like(outs[:1])))
        lses = torch.cat((lses, torch.full_like(lses[:1], float("-inf"))))
        return joined(outs[self._order], lses[self._order], 1)


class _Group:
    """Equally spaced runs as one view per layer."""

    def __init__(self, cache: Tensor, runs: list[SlotRun]) -> None:
        layers, _, heads, slots, dim = cache.shape
        width = max(run.length for run in runs)
        stride = runs[1].low - runs[0].low if len(runs) > 1 else 0
        views = cache.as_strided(
            (layers * 2, len(runs), heads, width, dim),
            (heads * slots * dim, stride * dim, slots * dim, dim, 1),
            runs[0].low * dim,
        ).unbind(0)
        self._layers = list(zip(views[::2], views[1::2], strict=True))
        rows = [run.row for run in runs]
        consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        self._rows = slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows, device=cache.device)
        self._mask = None
        if any(run.length < width for run in runs):
            lengths = torch.tensor([run.length for run in runs], device=cache.device)
            beyond = torch.arange(width, device=cache.device) >= lengths[:, None]
            self._mask = torch.zeros_like(beyond, dtype=cache.dtype).masked_fill_(beyond, float("-inf"))[:, None, None]

    def attend(self, layer: int, q: Tensor, scale: float) -> Partial:
        return flash(q[self._rows], *self._layers[layer], scale, mask=self._mask)


def _order(rows: list[int], num_rows: int, device: torch.device) -> Tensor | None:
    """The parts of each row: [rows], or [rows, most parts] if some have several; None if already in order."""
    if rows == list(range(num_rows)):
        return None
    parts: list[list[int]] = [[] for _ in range(num_rows)]
    for part, row in enumerate(rows):
        parts[row].append(part)
    most = max(map(len, parts))
    if most == 1:
        return torch.tensor([own[0] for own in parts], device=device)
    return torch.tensor([own + [len(rows)] * (most - len(own)) for own in parts], device=device)

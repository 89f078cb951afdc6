"""Where runners keep what drafts would do to recurrent states, until the next step of their sequence says how many were
right. Knows slots and positions, and no tensors.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ostro.engine.batch import Batch, Chunk


class Lane(NamedTuple):
    """One chunk's lane, and how many of the drafts in it come before the chunk."""

    number: int = 0
    applied: int = 0


class _Kept(NamedTuple):
    lane: int
    position: int
    """That of the first draft."""


class DraftLanes:
    def __init__(self, number: int) -> None:
        """As many as there are slots are always enough."""
        # The lowest are taken first: memory that was never written is not there.
        self._free = list(range(number))
        self._kept: dict[int, _Kept] = {}

    def begin(self, batch: Batch) -> Sequence[Lane]:
        """The lanes of a batch's chunks, in order."""
        written = [target for _, target in batch.state_copies]
        written += [chunk.state for chunk in batch.chunks if chunk.start == 0]
        written += [slot for chunk in batch.chunks for _, slot in chunk.captures]
        self._free_lanes(self._kept.pop(slot).lane for slot in written if slot in self._kept)
        before = {chunk.state: self._kept.pop(chunk.state) for chunk in batch.chunks if chunk.state in self._kept}
        found = [self._lane(chunk, before.get(chunk.state)) for chunk in batch.chunks]
        # Only now: this step still reads them.
        self._free_lanes(kept.lane for slot, kept in before.items() if slot not in self._kept)
        return found

    def forget(self, slot: int) -> None:
        """The slot's state is overwritten between two steps."""
        if (kept := self._kept.pop(slot, None)) is not None:
            heapq.heappush(self._free, kept.lane)

    def _lane(self, chunk: Chunk, before: _Kept | None) -> Lane:
        applied = 0 if before is None else chunk.start - before.position
        if not chunk.drafts:
            return Lane(0 if before is None else before.lane, applied)
        lane = heapq.heappop(self._free) if before is None else before.lane
        self._kept[chunk.state] = _Kept(lane, chunk.end)
        return Lane(lane, applied)

    def _free_lanes(self, lanes: Iterable[int]) -> None:
        for lane in lanes:
            heapq.heappush(self._free, lane)

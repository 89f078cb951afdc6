"""Host memory below a GPU's pages and recurrent states: pinned slots (`host_slots`), and copies that run beside the
steps. Knows no engine beyond its port.

    steps    │ step 1 ─────│ gather │ step 2 ─────│ step 3 ─────│      a store costs the steps one copy on the device
    out             └──────────────> staged ──> slot                  and leaves the rest to a stream of its own
    in              └──> slot ──> staged ──> page ──│ arrived         a fetch costs them nothing

In a burst, stores that fill all staged blocks make the steps wait until the first of these has left. A fetch begins
after the steps launched before it, because the pages that it fills may still be in use by them; and after the stores
before it, because it may read what they write. It is reported once its copies are done, so that any later step finds
them.

A state is as large as a block, or larger. It is not staged: it leaves at once, and the next step waits until it has,
about a millisecond for 50 MiB. There are few such moves.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ostro.backends.cuda.host_slots import HostSlots
from ostro.backends.tiers.page_file import Bytes
from ostro.engine.page_store import (
    Arrival,
    Fetch,
    Move,
    Offer,
    Spill,
    SpillState,
    StateCopy,
    Store,
    StoreState,
    Unshared,
)

# Device memory for pages in transit: _BLOCKS blocks out, and one in. Copies across the bus are of one page at a time.
_BLOCKS = 4
_BLOCK_BYTES = 32 << 20

T = TypeVar("T")


class _Block(NamedTuple):
    pages: Tensor
    """[pages, layers × 2, numbers]"""
    free: "torch.cuda.Event"
    """When its last copy has left."""


class _UnderWay(NamedTuple):
    fetch: Fetch
    began: "torch.cuda.Event"
    ended: "torch.cuda.Event"


class HostStore(Unshared):
    num_state_slots: int
    has_disk = False
    on_disk = 0

    def __init__(
        self,
        memory: Tensor,
        num_slots: int,
        *,
        states: Sequence[Tensor] = (),
        num_state_slots: int = 0,
        overwritten: Callable[[int], None] = lambda state: None,
    ) -> None:
        """`memory` has the pages: [layers, key or value, pages, …]. Its last page belongs to no sequence. `states` have
        the recurrent states: [states, …] each, and a state is what all of them have at its place. `overwritten` is told
        which states fetches are about to write.
        """
        self.num_slots, self.num_state_slots = num_slots, num_state_slots if states else 0
        self._pages = HostSlots(memory.flatten(0, 1), num_slots)
        self._states = [HostSlots(each[None], self.num_state_slots) for each in states]
        self._overwritten = overwritten
        self._device = memory.device
        self.page_bytes = self._pages.record_bytes
        self.state_bytes = sum(each.record_bytes for each in self._states)
        is_cuda = self._device.type == "cuda"
        self._arrived: list[Arrival] = []
        self._under_way: deque[_UnderWay] = deque()
        block = max(1, min(num_slots, _BLOCK_BYTES // self.page_bytes))
        self.most_staged = _BLOCKS * block
        """How many pages can be on their way out before steps wait."""
        if is_cuda:
            self._blocks = [_Block(self._staging(block), torch.cuda.Event()) for _ in range(_BLOCKS)]
            self._incoming = self._staging(block)
            self._next_block = 0
            self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)

    def holds(self, digest: bytes) -> bool:
        return False

    @property
    def under_way(self) -> Collection[int]:
        return {each.fetch.ticket for each in self._under_way} | {each.ticket for each in self._arrived}

    @torch.inference_mode()
    def carry_out(self, moves: Sequence[Move]) -> None:
        stores: list[Store] = []
        for move in moves:
            match move:
                case Store():
                    stores.append(move)
                case Fetch():
                    self._store(stores)
                    stores = []
                    self._fetch(move)
                case Spill() | SpillState() | Offer():
                    raise AssertionError("there is no disk")
                case StoreState():
                    self._store(stores)
                    stores = []
                    self._store_state(move)
        self._store(stores)

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        if self._device.type == "cuda":
            self._take_arrived(wait=timeout > 0)
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, hot: Sequence[Spill | SpillState] = ()) -> None:
        """Waits for copies under way. The memory itself is freed when the process exits."""
        if self._device.type == "cuda":
            self._out.synchronize()
            self._in.synchronize()

    def stored(self) -> Callable[[], bool]:
        """A function that says whether the stores so far are done."""
        if self._device.type != "cuda":
            return lambda: True
        return self._out.record_event().query

    def slot(self, number: int) -> Bytes:
        """A view of a slot's memory. A page that was stored there has arrived once `stored` says so."""
        return self._pages.slot(number).view(torch.uint8).view(-1).numpy()

    def page(self, number: int) -> Bytes:
        """A copy of a page, after all steps and copies so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._pages.record(number).contiguous().cpu().view(torch.uint8).view(-1).numpy()

    def _staging(self, pages: int) -> Tensor:
        rows, _, numbers = self._pages.records.shape
        return torch.empty(pages, rows, numbers, dtype=self._pages.records.dtype, device=self._device)

    def _store(self, stores: Sequence[Store]) -> None:
        if self._device.type != "cuda":
            for page, slot in stores:
                self._pages.slot(slot).copy_(self._pages.record(page))
            return
        steps = torch.cuda.current_stream(self._device)
        for some in _in_parts(stores, len(self._incoming)):
            block = self._blocks[self._next_block]
            self._next_block = (self._next_block + 1) % _BLOCKS
            steps.wait_event(block.free)
            for at, store in enumerate(some):
                block.pages[at].copy_(self._pages.record(store.page))
            self._out.wait_stream(steps)
            with torch.cuda.stream(self._out):
                for at, store in enumerate(some):
                    self._pages.slot(store.slot).copy_(block.pages[at], non_blocking=True)
                block.free.record()

    def _store_state(self, move: StoreState) -> None:
        if self._device.type != "cuda":
            for each in self._states:
                each.slot(move.slot).copy_(each.record(move.state))
            return
        steps = torch.cuda.current_stream(self._device)
        self._out.wait_stream(steps)
        with torch.cuda.stream(self._out):
            for each in self._states:
                each.slot(move.slot).copy_(each.record(move.state), non_blocking=True)
        # The next step may overwrite it.
        steps.wait_stream(self._out)

    def _fetch_state(self, state: StateCopy | None) -> None:
        """Into a slot that no step uses: it needs no staging."""
        if state is None:
            return
        assert isinstance(state.source, int), "there is no disk"
        self._overwritten(state.state)
        for each in self._states:
            each.record(state.state).copy_(each.slot(state.source), non_blocking=True)

    def _fetch(self, fetch: Fetch) -> None:
        slots = [source for source in fetch.sources if isinstance(source, int)]
        assert len(slots) == len(fetch.sources), "there is no disk"
        moves = list(zip(slots, fetch.pages, strict=True))
        if self._device.type != "cuda":
            for slot, page in moves:
                self._pages.record(page).copy_(self._pages.slot(slot))
            self._fetch_state(fetch.state)
            self._arrived.append(Arrival(fetch.ticket, len(moves), 0.0, has_state=fetch.state is not None))
            return
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_stream(self._out)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with torch.cuda.stream(self._in):
                began.record()
                for some in _in_parts(moves, len(self._incoming)):
                    for at, (slot, _) in enumerate(some):
                        self._incoming[at].copy_(self._pages.slot(slot), non_blocking=True)
                    for at, (_, page) in enumerate(some):
                        self._pages.record(page).copy_(self._incoming[at])
                self._fetch_state(fetch.state)
                ended.record()
            self._under_way.append(_UnderWay(fetch, began, ended))
        except BaseException:
            # The fetch counts as not begun, so others may get its pages: none of its copies may run after that.
            self._in.synchronize()
            raise

    def _take_arrived(self, *, wait: bool) -> None:
        """Fetches end in the order in which they began."""
        while self._under_way and (wait or self._under_way[0].ended.query()):
            fetch, began, ended = self._under_way.popleft()
            ended.synchronize()
            seconds = began.elapsed_time(ended) / 1e3
            arrival = Arrival(fetch.ticket, len(fetch.pages), seconds, has_state=fetch.state is not None)
            self._arrived.append(arrival)
            wait = False


def _in_parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), most):
        yield items[at : at + most]

"""Host memory below a GPU's pages: pinned slots, and copies that run beside the steps. Knows no engine beyond its port.

    steps    │ step 1 ─────│ gather │ step 2 ─────│ step 3 ─────│      a store costs the steps one copy on the device
    out             └──────────────> staged ──> slot                  and leaves the rest to a stream of its own
    in              └──> slot ──> staged ──> page ──│ arrived         a fetch costs them nothing

In a burst, stores that fill all staged blocks make the steps wait until the first of these has left. A fetch begins
after the steps launched before it, because the pages that it fills may still be in use by them; and after the stores
before it, because it may read what they write. It is reported once its copies are done, so that any later step finds
them.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ostro.backends.tiers.page_file import Bytes
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, Spill, SpillState, Store, StoreState, Unshared

# Device memory for pages in transit: _BLOCKS blocks out, and one in. Copies across the bus are of one page at a time.
_BLOCKS = 4
_BLOCK_BYTES = 32 << 20
# Host memory is allocated in pieces, by several threads.
_SEGMENT_BYTES = 1 << 30
# Pages are copied in the widest numbers that fit, which is several times as fast as byte by byte.
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)

# Threads that allocate host memory, and the size of the system's pages: each page must be touched.
_THREADS, _PAGE = 8, 4096

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
    has_disk = False
    on_disk = 0

    def __init__(self, memory: Tensor, num_slots: int) -> None:
        """`memory` has the pages: [layers, key or value, pages, …]. Its last page belongs to no sequence."""
        self.num_slots = num_slots
        self._pages = _as_numbers(memory)
        self._device = memory.device
        rows, _, numbers = self._pages.shape
        self.page_bytes = rows * numbers * self._pages.itemsize
        each = max(1, min(num_slots, _SEGMENT_BYTES // self.page_bytes))
        is_cuda = self._device.type == "cuda"
        counts = [min(each, num_slots - at) for at in range(0, num_slots, each)]
        sizes = [count * self.page_bytes for count in counts]
        pieces = pinned(sizes) if is_cuda else [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._segments = [
            piece.view(self._pages.dtype).view(count, rows, numbers)
            for piece, count in zip(pieces, counts, strict=True)
        ]
        if is_cuda:
            # Not at exit, when CUDA may be gone.
            weakref.finalize(self, unpin, pieces).atexit = False
        self._slots_each = each
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
                    raise AssertionError("there are no slots for states")
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
        return self._slot(number).view(torch.uint8).view(-1).numpy()

    def page(self, number: int) -> Bytes:
        """A copy of a page, after all steps and copies so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._pages[:, number].contiguous().cpu().view(torch.uint8).view(-1).numpy()

    def _slot(self, number: int) -> Tensor:
        return self._segments[number // self._slots_each][number % self._slots_each]

    def _staging(self, pages: int) -> Tensor:
        rows, _, numbers = self._pages.shape
        return torch.empty(pages, rows, numbers, dtype=self._pages.dtype, device=self._device)

    def _store(self, stores: Sequence[Store]) -> None:
        if self._device.type != "cuda":
            for page, slot in stores:
                self._slot(slot).copy_(self._pages[:, page])
            return
        steps = torch.cuda.current_stream(self._device)
        for some in _in_parts(stores, len(self._incoming)):
            block = self._blocks[self._next_block]
            self._next_block = (self._next_block + 1) % _BLOCKS
            steps.wait_event(block.free)
            for at, store in enumerate(some):
                block.pages[at].copy_(self._pages[:, store.page])
            self._out.wait_stream(steps)
            with torch.cuda.stream(self._out):
                for at, store in enumerate(some):
                    self._slot(store.slot).copy_(block.pages[at], non_blocking=True)
                block.free.record()

    def _fetch(self, fetch: Fetch) -> None:
        slots = [source for source in fetch.sources if isinstance(source, int)]
        assert len(slots) == len(fetch.sources), "there is no disk"
        moves = list(zip(slots, fetch.pages, strict=True))
        if self._device.type != "cuda":
            for slot, page in moves:
                self._pages[:, page].copy_(self._slot(slot))
            self._arrived.append(Arrival(fetch.ticket, len(moves), 0.0))
            return
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_stream(self._out)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with torch.cuda.stream(self._in):
                began.record()
                for some in _in_parts(moves, len(self._incoming)):
                    for at, (slot, _) in enumerate(some):
                        self._incoming[at].copy_(self._slot(slot), non_blocking=True)
                    for at, (_, page) in enumerate(some):
                        self._pages[:, page].copy_(self._incoming[at])
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
            self._arrived.append(Arrival(fetch.ticket, len(fetch.pages), began.elapsed_time(ended) / 1e3))
            wait = False


def _as_numbers(memory: Tensor) -> Tensor:
    """[layers × 2, pages, numbers], the widest numbers that divide a page's part in a layer."""
    flat = memory.view(torch.uint8).flatten(3).flatten(0, 1)
    width = next(each for each in _WIDTHS if flat.shape[-1] % each.itemsize == 0)
    return flat.view(width)


def _in_parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), most):
        yield items[at : at + most]


# ---- pinned memory
#
# Allocated in pieces, by several threads at once: torch does it in one thread, which touches page after page and needs
# half a second for a gigabyte.


def pinned(sizes: Sequence[int]) -> list[Tensor]:
    """Pinned pieces of these sizes in bytes; give them back with `unpin`. Raises MemoryError, its text without a
    full stop, if there is not enough memory.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        asked = [pool.submit(_registered, size) for size in sizes]
    failed = [error for each in asked if (error := each.exception()) is not None]
    if failed:
        unpin([each.result() for each in asked if each.exception() is None])
        raise MemoryError(f"{sum(sizes) / 2**30:.1f} GiB of host memory cannot be pinned ({failed[0]})") from failed[0]
    return [each.result() for each in asked]


def unpin(pieces: Sequence[Tensor]) -> None:
    """Gives pieces back. Nothing may be copying from or to them."""
    for piece in pieces:
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _registered(num_bytes: int) -> Tensor:
    # Shared memory, the default, has no huge pages on most systems.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        # Copy-on-write after a fork must not separate the pages that the GPU knows from those that we write.
        memory.madvise(mmap.MADV_DONTFORK)
        # Huge pages, where the system has them, are registered several times as fast.
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(memory, np.uint8)
    numbers[::_PAGE] = 0
    piece = torch.from_numpy(numbers)
    if (code := int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), num_bytes, 0))) != 0:
        raise MemoryError(f"CUDA error {code}")
    return piece

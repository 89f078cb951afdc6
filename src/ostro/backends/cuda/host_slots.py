"""Slots in host memory for records that lie in a tensor on the device. Knows no engine.

Memory below a GPU is pinned, and allocated in pieces by several threads at once: torch does it in one thread, which
touches page after page and needs half a second for a gigabyte.
"""

import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

# Host memory is allocated in pieces of this size.
_SEGMENT_BYTES = 1 << 30
# Records are copied in the widest numbers that fit, which is several times as fast as byte by byte.
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)
# Threads that allocate host memory, and the size of the system's pages: each page must be touched.
_THREADS, _PAGE = 8, 4096


class HostSlots:
    """The records of one tensor, and slots for copies of some of them."""

    def __init__(self, memory: Tensor, num_slots: int) -> None:
        """`memory` has the records: [rows, records, …]. On a GPU, raises MemoryError if it cannot be pinned."""
        self.records = _as_numbers(memory)
        """[rows, records, numbers]"""
        rows, _, numbers = self.records.shape
        self.record_bytes = rows * numbers * self.records.itemsize
        each = max(1, min(num_slots, _SEGMENT_BYTES // self.record_bytes))
        is_cuda = memory.device.type == "cuda"
        counts = [min(each, num_slots - at) for at in range(0, num_slots, each)]
        sizes = [count * self.record_bytes for count in counts]
        pieces = pinned(sizes) if is_cuda else [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._segments = [
            piece.view(self.records.dtype).view(count, rows, numbers)
            for piece, count in zip(pieces, counts, strict=True)
        ]
        if is_cuda:
            # Not at exit, when CUDA may be gone.
            weakref.finalize(self, unpin, pieces).atexit = False
        self._slots_each = each

    def slot(self, number: int) -> Tensor:
        """[rows, numbers]"""
        return self._segments[number // self._slots_each][number % self._slots_each]

    def record(self, number: int) -> Tensor:
        """[rows, numbers], on the device."""
        return self.records[:, number]


def _as_numbers(memory: Tensor) -> Tensor:
    """[rows, records, numbers], the widest numbers that divide a row's part of a record."""
    flat = memory.view(torch.uint8).flatten(2)
    width = next(each for each in _WIDTHS if flat.shape[-1] % each.itemsize == 0)
    return flat.view(width)


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

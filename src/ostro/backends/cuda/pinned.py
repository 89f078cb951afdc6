"""Host memory that a GPU copies from and to by itself: taken in pieces, by several threads at once. Knows no pages.

torch's own pinned memory is taken by one thread, which touches it page by page: half a second for a gigabyte.
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_THREADS = 8
_PAGE = 4096


def pinned(sizes: Sequence[int]) -> list[Tensor]:
    """Pieces of so many bytes; give them back with `unpin`. Raises MemoryError, a sentence without its full stop, if
    there is not so much memory.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        asked = [pool.submit(_registered, size) for size in sizes]
    failed = [error for each in asked if (error := each.exception()) is not None]
    if failed:
        unpin([each.result() for each in asked if each.exception() is None])
        raise MemoryError(f"{sum(sizes) / 2**30:.1f} GiB of host memory cannot be pinned ({failed[0]})") from failed[0]
    return [each.result() for each in asked]


def unpin(pieces: Sequence[Tensor]) -> None:
    """Nothing may copy from or to them any more."""
    for piece in pieces:
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _registered(num_bytes: int) -> Tensor:
    # Shared memory, the default, has no huge pages on most systems.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        # A child's copy-on-write must not part the pages that the GPU knows from those that we write.
        memory.madvise(mmap.MADV_DONTFORK)
        # Registered several times as fast, where the system has them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(memory, np.uint8)
    numbers[::_PAGE] = 0
    piece = torch.from_numpy(numbers)
    if (code := int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), num_bytes, 0))) != 0:
        raise MemoryError(f"CUDA error {code}")
    return piece

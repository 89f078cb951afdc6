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

from ostro.errors import ModelError

_THREADS = 8
_PAGE = 4096


def pinned(sizes: Sequence[int]) -> list[Tensor]:
    """Pieces of so many bytes; give them back with `unpin`. Raises ModelError if there is not so much memory."""
    pieces: list[Tensor] = []
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            pieces += pool.map(_registered, sizes)
    except (MemoryError, OSError, RuntimeError) as error:
        size = f"{sum(sizes) / 2**30:.1f} GiB"
        raise ModelError(f"{size} of host memory cannot be pinned ({error}). Lower kv_host_memory.") from error
    return pieces


def unpin(pieces: Sequence[Tensor]) -> None:
    """Nothing may copy from or to them any more."""
    for piece in pieces:
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _registered(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes)
    with suppress(AttributeError, OSError):
        # Registered several times as fast, where the system has them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(memory, np.uint8)
    numbers[::_PAGE] = 0
    piece = torch.from_numpy(numbers)
    if (code := int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), num_bytes, 0))) != 0:
        raise MemoryError(f"CUDA error {code}")
    return piece

"""The C library's allocator in this process. Knows nothing of what is allocated."""

import ctypes
import sys
from typing import Final

# glibc's number for the setting, and its own first value.
_M_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 128 << 10


def give_back_large_blocks() -> None:
    """Has large blocks returned to the system as soon as they are freed, where the C library is glibc.

    Left alone, glibc raises the size from which it does so to that of the largest block freed so far. What a burst of
    long requests took then stays with the process, as holes between blocks that are still in use.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def give_back_free_memory() -> None:
    """Returns all that is free to the system, in some milliseconds, where the C library is glibc.

    Tokenising a long text takes many small blocks, a hundred times its size in all. Their arenas belong to threads, and
    glibc keeps them.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

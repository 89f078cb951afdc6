"""Memory in huge pages, of which one entry of a CPU's address cache covers 2 MB instead of 4 KB. Linux only: elsewhere
nothing is asked for, and nothing got.
"""

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE = 2 << 20
# Linux 5.14 and 6.1; Python does not name them.
_POPULATE_READ, _COLLAPSE = 22, 25
# Copied at a time by a thread.
_PART = 2 * HUGE
_ADVISED = 128 * HUGE
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/smaps")
# How smaps names memory in huge pages: of no file, of a file on disk, of one in memory.
_FIELDS = {"AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:"}


def setting(path: Path = _SETTING) -> str | None:
    """The system's: always, madvise or never; None if it has no huge pages of this kind."""
    try:
        return path.read_text(encoding="ascii").partition("[")[2].partition("]")[0] or None
    except OSError:
        return None


def are_there() -> bool:
    """Whether programs may ask for huge pages."""
    return sys.platform == "linux" and setting() not in (None, "never")


def gather(mapping: mmap.mmap) -> None:
    """Moves what is mapped into huge pages, if the kernel can."""
    # One after the other: a kernel that does not know or allow one may do the next.
    _advise(mapping, mmap.MADV_HUGEPAGE)
    _advise(mapping, _COLLAPSE)


def populate(mapping: mmap.mmap) -> None:
    """Lets the page tables point to all that is mapped."""
    _advise(mapping, _POPULATE_READ)


def _advise(mapping: mmap.mmap, advice: int) -> None:
    # In parts, as Python's other threads wait for each.
    for at in range(0, len(mapping), _ADVISED):
        with suppress(OSError):
            mapping.madvise(advice, at, min(_ADVISED, len(mapping) - at))


def copied(mapping: mmap.mmap, threads: int) -> Bytes:
    """A copy in huge pages, as far as there are any. Raises OSError if there is no memory for it."""
    size = len(mapping)
    memory = mmap.mmap(-1, -(-size // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    source, target = np.frombuffer(mapping, np.uint8), np.frombuffer(memory, np.uint8)[:size]

    def copy(at: int) -> None:
        part = slice(at, min(at + _PART, size))
        # numpy releases the GIL.
        np.copyto(target[part], source[part])
        # Otherwise the process would have all of it twice for a while.
        mapping.madvise(mmap.MADV_DONTNEED, at, part.stop - at)

    with ThreadPoolExecutor(threads, thread_name_prefix="copy") as pool:
        list(pool.map(copy, range(0, size, _PART)))
    # What found no huge page when it was written.
    _advise(memory, _COLLAPSE)
    target.flags.writeable = False
    return target


def count(memory: Bytes, maps: Path = _MAPS) -> int:
    """The bytes in huge pages, at most, as the kernel counts them for whole mappings."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.size
    found, inside = 0, False
    try:
        with maps.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, *rest = line.split()
                if not name.endswith(":"):
                    first, _, last = name.partition("-")
                    inside = int(first, 16) < end and int(last, 16) > start
                elif inside and name in _FIELDS:
                    found += int(rest[0]) * 1024
    except OSError:
        return 0
    return min(found, memory.size)

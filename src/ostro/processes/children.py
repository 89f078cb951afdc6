"""The processes that this one has started, and the memory of them all. Starts nothing. Needs /proc."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children() -> Iterator[int]:
    """Their ids, one level down."""
    for path in Path("/proc/self/task").glob("*/children"):
        # The thread may have ended meanwhile.
        with suppress(OSError):
            yield from map(int, path.read_text(encoding="ascii").split())


def resident_bytes() -> int:
    """Resident memory of this process and its children; what a child shares with others, such as libraries, is counted
    once. Without /proc, the peak of this process.
    """
    try:
        pages, _ = _pages("self")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for child in children():
        # It may have ended meanwhile.
        with suppress(OSError):
            resident, shared = _pages(str(child))
            pages += resident - shared
    return pages * resource.getpagesize()


def _pages(process: str) -> tuple[int, int]:
    """Resident pages, and those of them that belong to files or shared memory."""
    _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()
    return int(resident), int(shared)

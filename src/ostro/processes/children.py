"""The processes that this one has started or inherited, and their memory. Starts nothing. Needs /proc."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children() -> Iterator[int]:
    """Ids of this process's direct children."""
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


def reap_orphans() -> int:
    """Reaps processes that have exited and that nobody else will wait for, when the server is process 1: in a container
    it inherits what its children leave behind. Returns how many.

    Every process that the server starts leads its own process group, and its starter waits for it. A dead process that
    leads no group was inherited, such as the pip of a cancelled download. An inherited group leader, such as a shell
    job in the container, cannot be told from ours and is left alone.
    """
    if os.getpid() != 1 or not _has_ended(os.P_ALL, 0):
        return 0
    # Individually, because waiting for any child would return the same one again and again.
    return sum(_reap(pid) for pid in children())


def _reap(pid: int) -> bool:
    # A thread waiting for its own child may be faster.
    with suppress(ChildProcessError, ProcessLookupError):
        if _has_ended(os.P_PID, pid) and os.getpgid(pid) != pid:
            return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _has_ended(kind: int, number: int) -> bool:
    """Whether such a process has exited and not been reaped; does not reap it."""
    try:
        return os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False

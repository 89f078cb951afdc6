"""Reaps orphans when the server is process 1: in a container it inherits what its children leave behind.

Every process that the server starts leads its own process group, and its starter waits for it. A dead process that
leads no group was inherited, such as the pip of a cancelled download; nobody else will ever wait for it. An inherited
group leader, such as a shell job in the container, cannot be told from ours and is left alone.
"""

import os
from contextlib import suppress

from ostro.processes.children import children


def reap_orphans() -> int:
    """Reaps inherited processes that have exited; returns how many."""
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
    """Whether one of them has exited and not been reaped; does not reap it."""
    try:
        return os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False

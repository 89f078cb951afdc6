"""Other processes of this machine: which of them still run, and the memory they take. Starts none that stays."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_BOOT = _PROC / "sys" / "kernel" / "random" / "boot_id"
_ENDED = "ZXx"


def identity(pid: int) -> str | None:
    """Tells this process from others that had or will have its id; None if it has ended."""
    if not _BOOT.exists():
        return _identity_by_ps(pid)
    fields = _stat(pid)
    # Zombies have ended, even if nobody waits for them, as in a container without an init process.
    if fields is None or fields[0] in _ENDED:
        return None
    boot = _BOOT.read_text(encoding="ascii").strip()
    return f"{boot} {fields[19]}"


def tree_bytes(pid: int) -> int | None:
    """Memory of a process and its descendants, where what several processes share counts in parts; None if unknown."""
    if not _BOOT.exists():
        return _tree_bytes_by_ps(pid)
    parents = {each: int(fields[1]) for each in _pids() if (fields := _stat(each)) is not None}
    sizes = [size for each in _descendants(pid, parents) if (size := _bytes(each)) is not None]
    return sum(sizes) if sizes else None


def _descendants(pid: int, parents: dict[int, int]) -> Iterator[int]:
    yield pid
    for each, parent in parents.items():
        if parent == pid:
            yield from _descendants(each, parents)


def _pids() -> Iterator[int]:
    return (int(path.name) for path in _PROC.iterdir() if path.name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: state, parent, …; None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second is the program's name, which may contain spaces and parentheses.
    return text.rpartition(")")[2].split()


def _bytes(pid: int) -> int | None:
    with suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError):
        pages = int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


# --- macOS -----------------------------------------------------------------------------------------------------------


def _identity_by_ps(pid: int) -> str | None:
    rows = _ps("-p", str(pid), "-o", "stat=,lstart=")
    return None if not rows or rows[0][0][0] in _ENDED else " ".join(rows[0][1:])


def _tree_bytes_by_ps(pid: int) -> int | None:
    rows = {int(row[0]): (int(row[1]), int(row[2]) * 1024) for row in _ps("-axo", "pid=,ppid=,rss=")}
    if pid not in rows:
        return None
    return sum(rows[each][1] for each in _descendants(pid, {each: parent for each, (parent, _) in rows.items()}))


def _ps(*options: str) -> list[list[str]]:
    try:
        # In a process group of its own, like everything that a server starts.
        ran = subprocess.run(
            ["ps", *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
            process_group=0,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split() for line in ran.stdout.splitlines() if line.strip()]

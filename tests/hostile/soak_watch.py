"""What a server's processes hold, and whether that grows. Knows /proc, so it needs Linux."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ENGINE = b"ostro.engine_process.process"


@dataclass(frozen=True)
class Holdings:
    anonymous_bytes: int
    """Resident memory that belongs to no file: mapped weights are not counted."""
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Holdings":
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            anonymous_bytes=int(status["RssAnon"].split()[0]) * 1024,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"]),
        )

    def __str__(self) -> str:
        return f"{self.anonymous_bytes / 1e6:.1f} MB, {self.descriptors} descriptors, {self.threads} threads"


def engines_of(server: int) -> list[int]:
    """The engine processes of a server, in the order in which they were started."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return sorted((int(pid) for pid in children if _ENGINE in _command(int(pid))), key=_started)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def growth(values: Sequence[float], warm_up: float = 0.2) -> float:
    """From the median of the first values after warm-up to that of the last ones: one odd value changes neither."""
    settled = values[int(len(values) * warm_up) :]
    few = min(3, len(settled) // 2)
    return statistics.median(settled[-few:]) - statistics.median(settled[:few]) if few else 0.0

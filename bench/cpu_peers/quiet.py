"""Whether anything else ran on the machine meanwhile: stolen time, and pressure on its CPUs. Knows /proc."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_STOLEN, MOST_PRESSURE = 0.01, 0.05
"""Shares of the time above which a measurement counts as disturbed."""

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_STEAL = 8


@dataclass(frozen=True, slots=True)
class Disturbance:
    stolen: float | None
    """Share of the CPUs' time that their host gave to others; None where it is not told."""
    pressure: float | None
    """Share of the time in which something waited for a CPU; None where it is not told."""

    @property
    def quiet(self) -> bool:
        return (self.stolen or 0) <= MOST_STOLEN and (self.pressure or 0) <= MOST_PRESSURE


@dataclass(frozen=True, slots=True)
class Counters:
    seconds: float
    stolen: float | None
    """Seconds, of all CPUs together."""
    waiting: float | None
    """Seconds in which at least one task waited for a CPU."""

    def until(self, later: "Counters") -> Disturbance:
        return Disturbance(
            _share(self.stolen, later.stolen, (later.seconds - self.seconds) * (os.cpu_count() or 1)),
            _share(self.waiting, later.waiting, later.seconds - self.seconds),
        )


def counters(proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> Counters:
    return Counters(clock(), _stolen(proc / "stat"), _waiting(proc / "pressure" / "cpu"))


def _share(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None or seconds <= 0 else (after - before) / seconds


def _stolen(path: Path) -> float | None:
    try:
        words = path.read_text(encoding="ascii").split("\n", 1)[0].split()
        return int(words[_STEAL]) / _TICKS
    except (OSError, IndexError, ValueError):
        return None


def _waiting(path: Path) -> float | None:
    """`some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`"""
    try:
        words = path.read_text(encoding="ascii").split("\n", 1)[0].split()
        return int(words[-1].removeprefix("total=")) / 1e6
    except (OSError, IndexError, ValueError):
        return None

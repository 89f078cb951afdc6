"""Download progress: a bar on a terminal, otherwise an occasional log line; and figures for who listens to
`ARRIVALS`.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ARRIVALS = f"{__name__}.arrivals"
"""Name of a logger whose DEBUG records have an `Arrived` as their only argument."""

_LOG_SECONDS = 10.0
_TELL_SECONDS = 0.5

_log = logging.getLogger(__name__)
_arrivals = logging.getLogger(ARRIVALS)


@dataclass(frozen=True, slots=True)
class Arrived:
    """How much of a download is here."""

    num_bytes: int
    total: int | None
    """None if unknown."""


class Meter:
    def __init__(self, label: str, total: int | None, arrived: int, bar: Any) -> None:
        self._label, self._total, self._arrived, self._bar = label, total, arrived, bar
        self._lock = threading.Lock()
        self._last_line = self._last_told = time.monotonic()
        _arrivals.debug("%s", Arrived(arrived, total))

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived += num_bytes
            self._bar.update(num_bytes)
            now = time.monotonic()
            if now - self._last_told >= _TELL_SECONDS:
                self._last_told = now
                _arrivals.debug("%s", Arrived(self._arrived, self._total))
            if self._bar.disable and now - self._last_line >= _LOG_SECONDS:
                self._last_line = now
                of_total = "" if self._total is None else f" of {self._total / 1e6:.0f}"
                _log.info("fetching %s: %.0f%s MB", self._label, self._arrived / 1e6, of_total)


@contextmanager
def metered(label: str, total: int | None, arrived: int, *, progress: bool) -> Iterator[Meter]:
    """`total` is None if unknown."""
    from tqdm import tqdm

    started = time.monotonic()
    # None makes tqdm hide the bar when the output is not a terminal.
    hidden = None if progress else True
    size = "" if total is None else f": {total / 1e6:.0f} MB, of which {arrived / 1e6:.0f} MB are already here"
    _log.info("fetching %s%s", label, size)
    with tqdm(total=total, initial=arrived, desc=label, unit="B", unit_scale=True, disable=hidden) as bar:
        yield Meter(label, total, arrived, bar)
    _log.info("fetched %s in %.1f s", label, time.monotonic() - started)

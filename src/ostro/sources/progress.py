"""How far a download is, shown: by a bar on a terminal, else by a line of the log now and then."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Meter:
    def __init__(self, label: str, total: int, arrived: int, bar: Any) -> None:
        self._label, self._total, self._arrived, self._bar = label, total, arrived, bar
        self._lock = threading.Lock()
        self._last_line = time.monotonic()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived += num_bytes
            self._bar.update(num_bytes)
            now = time.monotonic()
            if self._bar.disable and now - self._last_line >= _LOG_SECONDS:
                self._last_line = now
                _log.info("fetching %s: %.0f of %.0f MB", self._label, self._arrived / 1e6, self._total / 1e6)


@contextmanager
def metered(label: str, total: int, arrived: int, *, progress: bool) -> Iterator[Meter]:
    from tqdm import tqdm

    started = time.monotonic()
    # None hides it where nobody looks: when the output is no terminal.
    hidden = None if progress else True
    _log.info("fetching %s: %.0f MB, %.0f MB of it here already", label, total / 1e6, arrived / 1e6)
    with tqdm(total=total, initial=arrived, desc=label, unit="B", unit_scale=True, disable=hidden) as bar:
        yield Meter(label, total, arrived, bar)
    _log.info("fetched %s in %.1f s", label, time.monotonic() - started)

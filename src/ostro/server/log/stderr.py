"""Turns standard error into log lines: libraries, native code and child processes write there."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_STDERR = 2
_LAST_LINES_SECONDS = 1.0
# A longer line is logged in pieces: it may never end.
_LONGEST_LINE = 4_000

_log = logging.getLogger("stderr")


@contextmanager
def stderr_logged() -> Iterator[TextIO]:
    """Logs everything that this process or one that it starts writes to standard error, line by line.

    Yields the real standard error, for the log itself, and restores it afterwards.
    """
    sys.stderr.flush()
    real = os.dup(_STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    reader = threading.Thread(target=_log_lines, args=[reading], name="stderr", daemon=True)
    reader.start()
    try:
        # Not closed: the log's last lines are written to it when the program ends.
        yield open(real, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os.dup2(real, _STDERR)
        # A process that we do not control may keep its end of the pipe open.
        reader.join(_LAST_LINES_SECONDS)
        logging.getLogger().handlers[0].flush()


def _log_lines(reading: int) -> None:
    with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
        while line := lines.readline(_LONGEST_LINE):
            if text := line.rstrip():
                _log.warning("%s", text)

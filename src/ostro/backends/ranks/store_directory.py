"""The directory of the file through which ranks find each other. A killed process removes nothing: the next that makes
a directory of its own removes what was left.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "ostro-ranks-"


class StoreDirectory:
    """A new directory, locked until it is removed or this process ends."""

    def __init__(self, parent: Path | None = None) -> None:
        """Removes those in `parent`, by default the system's directory for temporary files, that nobody has locked."""
        parent = parent or Path(tempfile.gettempdir())
        for path in parent.glob(f"{_PREFIX}*"):
            _remove_abandoned(path)
        self.path, self._lock = _locked(parent)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have taken it for abandoned before it was locked.
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_abandoned(path: Path) -> None:
    # It may be another user's, locked, or gone by now.
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)

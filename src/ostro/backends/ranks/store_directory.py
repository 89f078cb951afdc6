"""The directory of the file through which ranks find each other. A killed process leaves its directory behind; the next
process that makes one removes it.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ostro.errors import DiskFull

_PREFIX = "ostro-ranks-"


class StoreDirectory:
    """A new directory, locked until it is removed or this process ends."""

    def __init__(self, parent: Path | None = None) -> None:
        """Removes abandoned ones, which nobody has locked, in `parent`: by default, the temporary directory. Raises
        DiskFull if none can be made there.
        """
        try:
            parent = parent or Path(tempfile.gettempdir())
            for path in parent.glob(f"{_PREFIX}*"):
                _remove_abandoned(path)
            self.path, self._lock = _locked(parent)
        except OSError as error:
            raise DiskFull(
                f"Ranks find each other through a temporary file, and none can be made ({error.strerror or error}). "
                "Set TMPDIR to a directory that can be written."
            ) from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Before it was locked, another process may have removed it as abandoned.
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_abandoned(path: Path) -> None:
    # It may belong to another user, be locked, or be gone by now.
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)

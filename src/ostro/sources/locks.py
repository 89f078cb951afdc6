"""Who uses a directory of the cache, told by locks on it that end with their processes. Knows no models.

LOCK_SH   whoever uses it holds one; its time is that of the last use
LOCK_EX   whoever deletes it has it alone, and then moves it away before anything in it goes
"""

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REMOVING = ".removing"
_TOUCH_SECONDS = 300.0


class Hold:
    """Keeps a directory in the cache until it is closed, or its process ends. All that while it counts as used."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._closed = threading.Event()
        if descriptor is not None:
            touch(descriptor)
            self._thread = threading.Thread(target=self._use, args=(descriptor,), name="hold", daemon=True)
            self._thread.start()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._closed.set()
            self._thread.join()
            touch(descriptor)
            os.close(descriptor)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _use(self, descriptor: int) -> None:
        while not self._closed.wait(_TOUCH_SECONDS):
            touch(descriptor)


def touch(directory: Path | int) -> None:
    """Notes that it was used now."""
    # A cache that is shared read-only has no last use.
    with suppress(OSError):
        os.utime(directory)


def hold(directory: Path) -> Hold | None:
    """None if it is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    # Some network disks have no locks. There nothing can be locked alone either, so nothing is evicted.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if _is_still(directory, descriptor):
        return Hold(descriptor)
    os.close(descriptor)
    return None


@contextmanager
def alone(directory: Path) -> Iterator[bool]:
    """Whether it is there and nobody holds it; if so, nobody can while inside."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _lock_alone(descriptor) and _is_still(directory, descriptor)
    finally:
        os.close(descriptor)


def discard(directory: Path) -> bool:
    """Deletes it unless somebody holds it; says whether it did."""
    with alone(directory) as is_ours:
        if is_ours:
            # By another name first: half of it is never found, and a crash leaves something to sweep.
            doomed = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}{REMOVING}")
            directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return is_ours


def _lock_alone(descriptor: int) -> bool:
    for _ in range(2):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another that only looks, as we do, is done in a moment.
            time.sleep(0.01)
        else:
            return True
    return False


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the path names what was opened; it may have been moved away before the lock was had."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False

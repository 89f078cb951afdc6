"""Who uses a directory of the cache, told by locks on it that end with their processes. Knows no models.

LOCK_SH   whoever uses it holds one; its time is that of the last use
LOCK_EX   whoever deletes it has it alone, and then moves it away before anything in it goes

A mark is a hidden file in the directory, locked by the process that made it: one that nobody locks is a dead process's.
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
_MARK = ".loading-"
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


@contextmanager
def marked(directory: Path) -> Iterator[None]:
    """Leaves a mark in the directory if this process dies inside. Where none can be made, none is left."""
    mark = directory / f"{_MARK}{secrets.token_hex(8)}"
    descriptor = _make_mark(mark)
    try:
        yield
    finally:
        if descriptor is not None:
            # Deleted before it is unlocked: nobody must find it without its lock.
            with suppress(OSError):
                mark.unlink()
            os.close(descriptor)


def has_dead_mark(directory: Path) -> bool:
    """Whether a process died while it had the directory marked."""
    return any(_is_dead(mark) for mark in directory.glob(f"{_MARK}*"))


def _make_mark(mark: Path) -> int | None:
    # Locked before it has its name: nobody must find it without its lock.
    unnamed = mark.with_name(f".unlocked-{mark.name}")
    descriptor = None
    try:
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(mark)
    except OSError:
        # A cache that is shared read-only, a full disk, or a network disk without locks.
        with suppress(OSError):
            unnamed.unlink()
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _is_dead(mark: Path) -> bool:
    try:
        descriptor = os.open(mark, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


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

"""Tracks which processes use a cache directory, with locks that end with their process. Knows nothing about models.

LOCK_SH   held by every user; the directory's mtime is its last use
LOCK_EX   held to delete it; the directory is renamed before anything in it is removed

A mark is a hidden file in the directory, locked by its creator: an unlocked mark means that its creator died.
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
    """Protects a directory from eviction, and counts as use of it, until closed or until the process ends."""

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
    """Records a use now."""
    # Fails on a read-only shared cache, which tracks no last use.
    with suppress(OSError):
        os.utime(directory)


def hold(directory: Path) -> Hold | None:
    """None if the directory is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    # Some network file systems have no locks. An exclusive lock then fails too, so nothing is evicted.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if _is_still(directory, descriptor):
        return Hold(descriptor)
    os.close(descriptor)
    return None


@contextmanager
def alone(directory: Path) -> Iterator[bool]:
    """Yields whether the directory exists and is unused; if so, nobody else can use it inside the block."""
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
    """Deletes the directory unless it is in use; returns whether it did."""
    with alone(directory) as is_ours:
        if is_ours:
            # Renamed first, so that nobody finds it half deleted and a crash leaves something to sweep up.
            doomed = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}{REMOVING}")
            directory.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return is_ours


@contextmanager
def marked(directory: Path) -> Iterator[None]:
    """Leaves a mark in the directory if this process dies inside the block. Does nothing if no mark can be created."""
    mark = directory / f"{_MARK}{secrets.token_hex(8)}"
    descriptor = _make_mark(mark)
    try:
        yield
    finally:
        if descriptor is not None:
            # Unlinked before unlocking: an unlocked mark would look like a dead process's.
            with suppress(OSError):
                mark.unlink()
            os.close(descriptor)


def has_dead_mark(directory: Path) -> bool:
    """Whether a process died while it had the directory marked."""
    return any(_is_dead(mark) for mark in directory.glob(f"{_MARK}*"))


def _make_mark(mark: Path) -> int | None:
    # Locked before it gets its final name: an unlocked mark would look like a dead process's.
    unnamed = mark.with_name(f".unlocked-{mark.name}")
    descriptor = None
    try:
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(mark)
    except OSError:
        # A read-only shared cache, a full disk, or a network file system without locks.
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
            # Possibly another process making this same check; it will be done in a moment.
            time.sleep(0.01)
        else:
            return True
    return False


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the path still names the opened directory, which may have been renamed before the lock was acquired."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False

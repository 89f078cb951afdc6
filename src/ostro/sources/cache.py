"""The cache directory for downloaded models, and atomic writes into it. Knows no sources and no file formats.

ROOT/objects/                    models from object stores: see ostro.sources.store, which also evicts models
ROOT/pypi/NAME-VERSION.lock      held by the downloading process; others wait, then find the file
ROOT/pypi/NAME-VERSION.partial/  work in progress; deleted on failure, or kept for the next holder of the lock
ROOT/pypi/NAME-VERSION/FILE      appears by rename, once complete and synced to disk
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostro.errors import NO_ROOM, DiskFull, DownloadFailed

_QUIET_SECONDS = 1.0
_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """`OSTRO_CACHE` or `LOCAL_MODEL_CACHE`, else `ostro` in the user's cache directory."""
    if own := os.environ.get("OSTRO_CACHE") or os.environ.get("LOCAL_MODEL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ostro"


@contextmanager
def locked(lock: Path, waiting_for: str) -> Iterator[None]:
    """Holds this lock file across processes. While waiting, logs the reason from time to time."""
    from filelock import FileLock, Timeout

    file_lock = FileLock(lock)
    patience = _QUIET_SECONDS
    while True:
        try:
            file_lock.acquire(timeout=patience)
            break
        except Timeout:
            _log.info("waiting for %s in another process", waiting_for)
            patience = _LOG_SECONDS
    try:
        yield
    finally:
        file_lock.release()


@contextmanager
def work_directory(target: Path, *, keep: bool = False, doing: str = "the download") -> Iterator[Path]:
    """A scratch directory beside `target`, locked across processes. It starts empty and is deleted afterwards; with
    `keep` it retains what an earlier attempt left, and survives a failure unless the disk is full.

    File-system errors are raised as DiskFull or DownloadFailed. Look for `target` again once inside: another
    process may have created it while we waited.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f"{target.name}.lock"), f"{doing} of {target.name}"):
            if not keep:
                # Left by a process that was killed: its lock is released, so nobody is using it.
                shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(exist_ok=True)
            failed = True
            try:
                yield partial
                failed = False
            except (DiskFull, OSError):
                keep = False
                raise
            finally:
                if not (keep and failed):
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise file_error(error, target.parent) from error


def file_error(error: OSError, directory: Path) -> DiskFull | DownloadFailed:
    """Translates a file-system error that occurred while storing a model there."""
    if error.errno in NO_ROOM:
        return disk_full(directory)
    return DownloadFailed(
        f"Cannot write to {directory} ({error.strerror or error}). Set OSTRO_CACHE to a directory that you own."
    )


def disk_full(directory: Path, detail: str = "the disk is full") -> DiskFull:
    return DiskFull(f"No room for the model in {directory}: {detail}. Free some, or set OSTRO_CACHE to another disk.")


def publish(finished: Path, target: Path) -> None:
    """Atomically moves a finished file from the work directory to `target`; a crash never exposes half of it.

    Also works for a directory whose contents are already synced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sync(finished)
    finished.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

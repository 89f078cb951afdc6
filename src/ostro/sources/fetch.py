"""A model's files, from a store into the cache: in parallel, resumable, checked, whole or not at all.

list ─> room? ─> blocks, by several threads ─> checksums ─> sync, rename
  └─────────── once more, if an object changed or was damaged ─┘

A model that is whole in the cache is used as it is, without the network; `refresh` asks the store what is new.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostro.errors import DiskFull, DownloadFailed, ModelNotFound
from ostro.sources.base import (
    ObjectChanged,
    ObjectInfo,
    Reference,
    Transient,
    is_plain_path,
    open_source,
    parse_reference,
    patiently,
)
from ostro.sources.checksum import check
from ostro.sources.partial import Partial, Range
from ostro.sources.store import FileRecord, Manifest, ModelStore, cache_limit
from ostro.weights.cache import file_error, sync

_THREADS = 8
_ROUNDS = 3
_LOG_SECONDS = 10.0
# No pickles, no code, and of the directories only those that are read: an adapter, and an embedding model's modules.
_WANTED = re.compile(r"(?:(?:adapter|\d+_\w+)/)?(?!\.)[^/]+\.(?:json|safetensors|jinja)|tokenizer\.model|[^/]+\.gguf")
_UNWANTED = re.compile(r"consolidated.*\.safetensors")
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")

_log = logging.getLogger(__name__)


class _Damaged(Exception):
    """What arrived is not what the store says it has."""


class _Stopped(Exception):
    """Another thread failed, so this one need not go on."""


def fetch_model(reference: str, *, progress: bool, refresh: bool = False) -> Path:
    """The local directory with the model's files, downloaded as far as they are not in the cache.

    One process fetches a model; others wait for it. With `refresh` the store is asked for a newer version.
    """
    model = parse_reference(reference)
    store = ModelStore()
    if not refresh and (cached := _cached(store, model)):
        return cached
    try:
        with store.fetching(model) as directory:
            # Whoever held the lock before may have fetched it.
            if not refresh and (cached := _cached(store, model)):
                return cached
            store.sweep()
            return _Fetch(model, store, Partial(directory), progress=progress).run()
    except OSError as error:
        raise file_error(error, store.objects) from error


def _cached(store: ModelStore, model: Reference) -> Path | None:
    path = store.find(model)
    if path is not None:
        store.touch(path)
    return path


class _Fetch:
    """One model's download, held alone."""

    def __init__(self, model: Reference, store: ModelStore, partial: Partial, *, progress: bool) -> None:
        self.model = model
        self.store = store
        self.partial = partial
        self.source = open_source(model)
        self.progress = progress
        self._damaged: set[str] = set()

    def run(self) -> Path:
        try:
            for _ in range(_ROUNDS):
                try:
                    return self._round()
                except (ObjectChanged, _Damaged) as error:
                    reason = error
                    _log.warning("%s; starting over with what is whole", error)
        except OSError as error:
            full = file_error(error, self.store.objects)
            if isinstance(full, DiskFull):
                # A full disk stops others too: leave it as it was.
                self.partial.remove()
            raise full from error
        raise DownloadFailed(f"{self.model} could not be fetched in {_ROUNDS} rounds: {reason}. Try again later.")

    def _round(self) -> Path:
        wanted = self._wanted()
        target = self.store.place(self.model, _version(wanted))
        if self.store.is_whole(target):
            self.store.touch(target)
            self.partial.remove()
            return target
        self._adopt_unchanged(wanted)
        self.partial.prepare(wanted)
        missing = [(name, block) for name, info in wanted.items() for block in self.partial.missing(name, info)]
        needed = sum(end - start for _, (start, end) in missing)
        self.store.make_room(needed, cache_limit())
        total = sum(info.size for info in wanted.values())
        with _meter(str(self.model), total, total - needed, progress=self.progress) as meter, _Crew() as crew:
            for name, block in missing:
                crew.send(self._fetch_block, name, wanted[name], block, meter, crew)
            crew.join()
        files = self._checked(wanted)
        self.store.publish(self.partial.files, target, Manifest(str(self.model), self.model.name, time.time(), files))
        self.partial.remove()
        return target

    # --- what ---------------------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, ObjectInfo]:
        """The model's files by their paths in it, with checksums where the store has them."""
        found = patiently(f"Listing {self.model}", self._listed)
        if not found:
            raise ModelNotFound(f"There is nothing at {self.model}. Check the name.")
        if any(name.endswith(".safetensors") for name in found) and "config.json" in found:
            found = {name: info for name, info in found.items() if not name.endswith(".gguf")}
        if not any(name in ("config.json", "adapter_config.json") or name.endswith(".gguf") for name in found):
            raise ModelNotFound(f"There is neither a config.json nor a GGUF file at {self.model}. Check the name.")
        with _Crew() as crew:
            stats = {name: crew.send(self._with_checksum, info) for name, info in found.items()}
            crew.join()
        return {name: stat.result() for name, stat in stats.items()}

    def _listed(self) -> dict[str, ObjectInfo]:
        if self.model.key.endswith(".gguf"):
            return self._listed_gguf()
        prefix = self.model.directory
        found = {info.key.removeprefix(prefix): info for info in self.source.list(prefix)}
        return {
            name: info
            for name, info in found.items()
            if _WANTED.fullmatch(name) and not _UNWANTED.fullmatch(name) and is_plain_path(name)
        }

    def _listed_gguf(self) -> dict[str, ObjectInfo]:
        """One file, or all files of a model that was split."""
        directory, _, file = self.model.key.rpartition("/")
        split = _SPLIT.fullmatch(file)
        prefix = self.model.key[: -len(file)] + (split["stem"] if split else file)
        names = {info.key.removeprefix(f"{directory}/"): info for info in self.source.list(prefix)}
        if split is None:
            return {name: info for name, info in names.items() if name == file}
        others = re.compile(rf"{re.escape(split['stem'])}-\d{{5}}-of-{split['count']}\.gguf")
        return {name: info for name, info in names.items() if others.fullmatch(name)}

    def _with_checksum(self, info: ObjectInfo) -> ObjectInfo:
        if info.crc32c is not None:
            return info
        return patiently(f"Looking at {info.key}", lambda: self.source.stat(info.key))

    def _adopt_unchanged(self, wanted: dict[str, ObjectInfo]) -> None:
        """Files that an older version in the cache has too need no second download."""
        older = self.store.find(self.model)
        manifest = self.store.manifest(older) if older else None
        if older is None or manifest is None:
            return
        for name, info in wanted.items():
            record = manifest.files.get(name)
            same = record is not None and (record.generation, record.size) == (info.generation, info.size)
            if same and name not in self._damaged:
                self.partial.adopt(name, info, older / name)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _fetch_block(self, name: str, info: ObjectInfo, block: Range, meter: "_Meter", crew: "_Crew") -> None:
        def attempt() -> None:
            num_arrived = 0
            try:
                pieces = self.source.read(info.key, info.generation, *block)
                for num_bytes in self.partial.write(name, info, block, pieces):
                    crew.check()
                    num_arrived += num_bytes
                    meter.add(num_bytes)
            except Transient:
                meter.add(-num_arrived)
                raise

        patiently(f"Fetching {name} of {self.model}", attempt, wait=crew.wait)

    def _checked(self, wanted: dict[str, ObjectInfo]) -> dict[str, FileRecord]:
        """Reads every file back from the disk, compares it with what the store says, and puts it there for good."""
        with _Crew() as crew:
            checks = {name: crew.send(self._check, name, info) for name, info in wanted.items()}
            crew.join()
        results = {name: future.result() for name, future in checks.items()}
        damages = {name: damage for name, (_, damage) in results.items() if damage}
        for name, damage in damages.items():
            self.partial.forget(name)
            self._damaged.add(name)
            reason = _Damaged(f"{name} arrived damaged: {damage}")
        if damages:
            raise reason
        return {name: FileRecord(info.size, results[name][0], info.generation) for name, info in wanted.items()}

    def _check(self, name: str, info: ObjectInfo) -> tuple[str, str | None]:
        path = self.partial.files / name
        crc32c, damage = check(path, info)
        if damage is None:
            sync(path)
        return crc32c, damage


def _version(wanted: dict[str, ObjectInfo]) -> str:
    files = sorted((name, info.generation, info.size) for name, info in wanted.items())
    return hashlib.sha256(repr(files).encode()).hexdigest()[:12]


class _Crew:
    """Threads that work until the first of them fails."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        self._futures: list[Future[Any]] = []

    def send(self, work: Any, *args: object) -> Future[Any]:
        self._futures.append(self._pool.submit(work, *args))
        return self._futures[-1]

    def join(self) -> None:
        """Waits for all work; raises the first failure."""
        for future in as_completed(self._futures):
            future.result()

    def check(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def wait(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self.check()

    def __enter__(self) -> "_Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


# --- showing ----------------------------------------------------------------------------------------------------------


class _Meter:
    """Shows how far it is: a bar on a terminal, else a line now and then."""

    def __init__(self, label: str, total: int, arrived: int, bar: Any) -> None:
        self._label, self._total, self._arrived, self._bar = label, total, arrived, bar
        self._lock = threading.Lock()
        self._last_line = time.monotonic()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived += num_bytes
            self._bar.update(num_bytes)
            now = time.monotonic()
            if self._bar.disable and now - self._last_line >= _LOG_SECONDS:
                self._last_line = now
                _log.info("fetching %s: %.0f of %.0f MB", self._label, self._arrived / 1e6, self._total / 1e6)


@contextmanager
def _meter(label: str, total: int, arrived: int, *, progress: bool) -> Iterator[_Meter]:
    from tqdm import tqdm

    started = time.monotonic()
    # None hides it where nobody looks: when the output is no terminal.
    hidden = None if progress else True
    _log.info("fetching %s: %.0f MB, %.0f MB of it here already", label, total / 1e6, arrived / 1e6)
    with tqdm(total=total, initial=arrived, desc=label, unit="B", unit_scale=True, disable=hidden) as bar:
        yield _Meter(label, total, arrived, bar)
    _log.info("fetched %s in %.1f s", label, time.monotonic() - started)

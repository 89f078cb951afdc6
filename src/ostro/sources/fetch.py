"""Downloads a model from an object store into the cache: parallel, resumable, verified, and atomic.

list ─> space? ─> blocks, by several threads ─> checksums ─> sync, rename
  └─────────── again, if an object changed or was corrupted ─┘

A complete model in the cache is used without any network access; `refresh` asks the store for a newer version.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ostro.errors import DiskFull, DownloadFailed, ModelNotFound
from ostro.sources.address import StoreAddress, is_plain_path, parse_address
from ostro.sources.base import ObjectChanged, ObjectInfo, Source, Transient, with_retries
from ostro.sources.cache import file_error, sync
from ostro.sources.checksum import check
from ostro.sources.clients import open_source
from ostro.sources.disk_space import cache_limit
from ostro.sources.files import (
    gguf_files,
    gguf_prefix,
    is_index,
    is_model,
    missing,
    model_files,
    tokenizer_files,
)
from ostro.sources.partial import Partial, Range
from ostro.sources.progress import Meter, metered
from ostro.sources.store import FileRecord, Manifest, ModelStore

_THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")


class Stopped(Exception):
    """Another thread failed; this one should stop."""


class DownloadThreads:
    """A thread pool that stops at the first failure."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        self._futures: list[Future[Any]] = []

    def send(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._pool.submit(work, *args, **kwargs)
        self._futures.append(future)
        return future

    def join(self) -> None:
        """Waits for all work; raises the first failure."""
        for future in as_completed(self._futures):
            future.result()

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        self._stop.wait(seconds)
        self.check()

    def __enter__(self) -> "DownloadThreads":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


_ROUNDS = 3
_MOST_NAMED = 3

_log = logging.getLogger(__name__)


class _Damaged(Exception):
    """The downloaded bytes do not match the store's checksum or size."""


def fetch_model(reference: str, *, progress: bool, refresh: bool = False, tokenizer_only: bool = False) -> Path:
    """The local directory with the model's files, downloading those that are not cached.

    One process downloads a model while others wait for it. `refresh` asks the store for a newer version.
    `tokenizer_only` skips the weights, but is satisfied by a fully cached model.
    """
    model = parse_address(reference)
    store = ModelStore()
    if tokenizer_only:
        if not refresh and (cached := _cached(store, model)):
            return cached
        model = replace(model, part="tokenizer")
    if not refresh and (cached := _cached(store, model)):
        return cached
    source = open_source(model)
    try:
        with store.fetching(model) as directory:
            # The lock's previous holder may have fetched it.
            if not refresh and (cached := _cached(store, model)):
                return cached
            store.sweep()
            return _Fetch(model, source, store, Partial(directory), progress=progress).run()
    except OSError as error:
        raise file_error(error, store.objects) from error


def _cached(store: ModelStore, model: StoreAddress) -> Path | None:
    path = store.find(model)
    if path is not None:
        store.touch(path)
    return path


class _Fetch:
    """One model's download, under its lock."""

    def __init__(
        self, model: StoreAddress, source: Source, store: ModelStore, partial: Partial, *, progress: bool
    ) -> None:
        self.model = model
        self.source = source
        self.store = store
        self.partial = partial
        self.progress = progress
        self._damaged: set[str] = set()

    def run(self) -> Path:
        try:
            for _ in range(_ROUNDS):
                try:
                    return self._round()
                except (ObjectChanged, _Damaged) as error:
                    reason = error
                    _log.warning("%s; starting over with the intact files", error)
        except OSError as error:
            full = file_error(error, self.store.objects)
            if isinstance(full, DiskFull):
                # A full disk affects other programs too, so give the space back.
                self.partial.remove()
            raise full from error
        raise DownloadFailed(f"{self.model} could not be fetched in {_ROUNDS} rounds: {reason}. Try again later.")

    def _round(self) -> Path:
        wanted = self._wanted()
        target = self.store.place(self.model, _version(wanted))
        if self.store.is_whole(target):
            self.store.make_current(target)
            self.partial.remove()
            return target
        with self.store.reserving() as make_room:
            self._adopt_unchanged(wanted)
            self.partial.prepare(wanted)
            make_room(0, cache_limit())
        total = sum(info.size for info in wanted.values())
        num_missing = sum(end - start for _, (start, end) in self._missing(wanted))
        indexes = {name: info for name, info in wanted.items() if is_index(name)}
        others = {name: info for name, info in wanted.items() if name not in indexes}
        with metered(str(self.model), total, total - num_missing, progress=self.progress) as meter:
            files = self._arrived(indexes, meter)
            self._require_all(wanted, indexes)
            files |= self._arrived(others, meter)
        self.store.publish(self.partial.files, target, Manifest(str(self.model), self.model.name, time.time(), files))
        self.partial.remove()
        return target

    # --- listing ------------------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, ObjectInfo]:
        """The model's files, keyed by path within the model, each with a checksum."""
        found = with_retries(f"Listing {self.model}", self._listed)
        if not found:
            what = "no tokenizer" if self.model.part else "nothing"
            raise ModelNotFound(f"There is {what} at {self.model}. Check the name.")
        if not self.model.part and not is_model(found):
            raise ModelNotFound(f"There is neither a config.json nor a GGUF file at {self.model}. Check the name.")
        with DownloadThreads() as threads:
            stats = {name: threads.send(self._with_checksum, info, threads) for name, info in found.items()}
            threads.join()
        wanted = {name: stat.result() for name, stat in stats.items()}
        for info in wanted.values():
            _require_plain(f"{self.model.scheme}://{self.model.bucket}/{info.key}", info)
        return wanted

    def _listed(self) -> dict[str, ObjectInfo]:
        directory, _, file = self.model.key.rpartition("/")
        if not file.endswith(".gguf"):
            found = self._listed_under(self.model.directory, "")
            wanted = tokenizer_files(found) if self.model.part else model_files(found)
        else:
            found = self._listed_under(f"{directory}/" if directory else "", gguf_prefix(file))
            wanted = gguf_files(found, file)
        return {name: found[name] for name in wanted if is_plain_path(name)}

    def _listed_under(self, directory: str, prefix: str) -> dict[str, ObjectInfo]:
        return {info.key.removeprefix(directory): info for info in self.source.list(directory + prefix)}

    def _with_checksum(self, info: ObjectInfo, threads: DownloadThreads) -> ObjectInfo:
        if info.checksum is not None:
            return info
        try:
            return with_retries(f"Looking at {info.key}", lambda: self.source.stat(info.key), wait=threads.wait)
        except ModelNotFound as error:
            raise ObjectChanged(f"{info.key} is gone") from error

    def _require_all(self, wanted: Mapping[str, ObjectInfo], indexes: Mapping[str, ObjectInfo]) -> None:
        """Refuses a model whose upload is unfinished: once cached, it would pass for the whole model."""
        if self.model.part:
            return
        lacking = missing(wanted.keys(), {name: (self.partial.files / name).read_bytes() for name in indexes})
        if lacking:
            names = ", ".join(lacking[:_MOST_NAMED]) + (" and more" if len(lacking) > _MOST_NAMED else "")
            raise ModelNotFound(
                f"{self.model} is not complete in the store yet: it lacks {names}. Load it once the upload is complete."
            )

    def _adopt_unchanged(self, wanted: Mapping[str, ObjectInfo]) -> None:
        """Reuses files that an older cached version shares; they are verified like all others."""
        older = self.store.find(self.model)
        if older is None:
            return
        try:
            held = self.store.hold(older)
        except ModelNotFound:
            return
        with held:
            manifest = self.store.manifest(older)
            records = manifest.files if manifest else {}
            for name, info in wanted.items():
                record = records.get(name)
                same = record is not None and (record.generation, record.size) == (info.generation, info.size)
                if same and name not in self._damaged:
                    self.partial.adopt(name, info, older / name)

    # --- downloading --------------------------------------------------------------------------------------------------

    def _missing(self, wanted: Mapping[str, ObjectInfo]) -> list[tuple[str, Range]]:
        return [(name, block) for name, info in wanted.items() for block in self.partial.missing(name, info)]

    def _arrived(self, wanted: Mapping[str, ObjectInfo], meter: Meter) -> dict[str, FileRecord]:
        """Downloads the missing parts of these files, then re-reads each from disk, verifies it against the store's
        checksum and syncs it.
        """
        with DownloadThreads() as threads:
            for name, block in self._missing(wanted):
                threads.send(self._fetch_block, name, wanted[name], block, meter, threads)
            threads.join()
        with DownloadThreads() as threads:
            checks = {name: threads.send(self._check, name, info) for name, info in wanted.items()}
            threads.join()
        results = {name: future.result() for name, future in checks.items()}
        damages = {name: damage for name, (_, damage) in results.items() if damage}
        for name, damage in damages.items():
            self.partial.forget(name)
            self._damaged.add(name)
            reason = _Damaged(f"{name} arrived damaged: {damage}")
        if damages:
            raise reason
        return {name: FileRecord(info.size, results[name][0], info.generation) for name, info in wanted.items()}

    def _fetch_block(self, name: str, info: ObjectInfo, block: Range, meter: Meter, threads: DownloadThreads) -> None:
        def attempt() -> None:
            num_arrived = 0
            try:
                pieces = self.source.read(info.key, info.generation, *block)
                for num_bytes in self.partial.write(name, info, block, pieces):
                    threads.check()
                    num_arrived += num_bytes
                    meter.add(num_bytes)
            except Transient:
                meter.add(-num_arrived)
                raise

        with_retries(f"Fetching {name} of {self.model}", attempt, wait=threads.wait)

    def _check(self, name: str, info: ObjectInfo) -> tuple[str, str | None]:
        path = self.partial.files / name
        crc32c, damage = check(path, info)
        if damage is None:
            sync(path)
        return crc32c, damage


def _require_plain(place: str, info: ObjectInfo) -> None:
    if info.encoding is not None:
        raise DownloadFailed(f"{place} is stored with Content-Encoding {info.encoding}. Store it uncompressed.")
    if info.checksum is None:
        raise DownloadFailed(
            f"The store has no checksum of {place}, so damage on the way would go unnoticed. Store it again with one, "
            "as in: aws s3 cp FILE ADDRESS --checksum-algorithm CRC32"
        )


def _version(wanted: Mapping[str, ObjectInfo]) -> str:
    files = sorted((name, info.generation, info.size) for name, info in wanted.items())
    return hashlib.sha256(repr(files).encode()).hexdigest()[:12]

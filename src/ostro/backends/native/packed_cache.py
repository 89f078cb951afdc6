"""Packed weights in the model cache: found, verified and held, or created. Knows files and disk space; knows no models.

ROOT/packed/DIGEST.lock      held by the packing process; others wait, then find the file
ROOT/packed/DIGEST/          weights.ostro and its manifest; appears by rename, and is held while it is mapped

Unusable files are moved aside and recreated: damaged ones, those that another user could have written, and those whose
loading crashed a process. If the cache is full or read-only, weights are packed into an unnamed temporary file that
disappears with the process, and if no disk takes that either, into memory.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar, cast

from ostro.backends.model_facts import model_facts
from ostro.config import EngineConfig
from ostro.errors import NO_ROOM, BadCheckpoint, DiskFull, DownloadFailed
from ostro.kernels.cpu.library import library
from ostro.kernels.cpu.packed_file import BadPackedFile, PackedFile
from ostro.sources.cache import work_directory
from ostro.sources.disk_space import cache_limit
from ostro.sources.locks import has_dead_mark, hold, marked
from ostro.sources.store import FileRecord, Manifest, ModelStore
from ostro.weights import Checkpoint

# Incremented when the packed format changes, so that older files are packed again.
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class PackedKey:
    digest: str
    source: str
    """The checkpoint's path."""
    variant: str
    """How it was packed, in words. For each source and variant, only the newest packed file is useful."""


def packed_key(checkpoint: Checkpoint, config: EngineConfig, panel: int, part: str | None = None) -> PackedKey:
    """`part` says which experts are packed, if nothing else is."""
    made = (_FORMAT, library().ostro_version(), panel)
    facts: list[object] = [made, config.quantize, config.max_seq_len, dict(checkpoint.config), model_facts(checkpoint)]
    if part is not None:
        facts.append(part)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    variant = f"panels of {panel}" if part is None else f"panels of {panel}, experts"
    if config.quantize != "none":
        variant += f", {config.quantize}"
    if config.max_seq_len is not None:
        variant += f", context {config.max_seq_len}"
    return PackedKey(digest, str(checkpoint.path), variant)


WEIGHTS = "weights.ostro"

Pack = Callable[[BinaryIO, Callable[[int], None]], None]
"""Writes packed weights to a file. Announces the total number of bytes before writing any."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def with_packed_weights(key: PackedKey, pack: Pack, use: Callable[[PackedFile], T]) -> T:
    """Calls `use` with the weights previously packed for this key, or packed now by `pack`.

    If `use` finds old weights to be bad, they are packed again and used once more. Other exceptions from `pack` and
    `use` propagate, as does an OSError if the weights cannot be written anywhere.
    """
    store = ModelStore()
    target = store.packs / key.digest
    if isinstance(found := _use_kept(target, key, use), _Used):
        return found.value
    try:
        with work_directory(target, doing="the packing") as work:
            # Another process may have packed them meanwhile.
            if isinstance(found := _use_kept(target, key, use), _Used):
                return found.value
            if found is not None:
                aside = store.quarantine(target)
                _log.warning("%s It was moved to %s, and the weights are packed again.", found.reason, aside)
            packed = _pack_and_keep(store, target, key, pack, work)
    except (DiskFull, DownloadFailed) as error:
        return use(_pack_for_now(key, pack, error.message))
    with marked(target):
        return use(packed)


@dataclass(frozen=True, slots=True)
class _Used(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _Unusable:
    reason: str
    """A sentence that names the file."""


def _use_kept(target: Path, key: PackedKey, use: Callable[[PackedFile], T]) -> _Used[T] | _Unusable | None:
    """None if nothing was packed before."""
    if (held := hold(target)) is None:
        return None
    try:
        if has_dead_mark(target):
            return _Unusable(f"A process died while it loaded {target / WEIGHTS}.")
        packed = PackedFile.open(target / WEIGHTS, key=key.digest)
        with marked(target):
            used = _Used(use(packed))
    except BadPackedFile as error:
        return _Unusable(f"{target / WEIGHTS} {error.reason}.")
    except BadCheckpoint as error:
        return _Unusable(f"{target / WEIGHTS} cannot be used: {error.message}")
    except OSError as error:
        return _Unusable(f"{target / WEIGHTS} cannot be read ({error.strerror or error}).")
    else:
        # Keeps the file from being evicted while it is mapped.
        weakref.finalize(packed, held.close)
        held = None
        return used
    finally:
        if held is not None:
            held.close()


def _pack_and_keep(store: ModelStore, target: Path, key: PackedKey, pack: Pack, work: Path) -> PackedFile:
    files = work / "files"
    files.mkdir()
    path = files / WEIGHTS

    def make_room(nbytes: int) -> None:
        with store.reserving() as reserve:
            reserve(nbytes, cache_limit())
            # Reserves the final size, so that others who make room account for it.
            os.truncate(path, nbytes)

    with path.open("w+b") as file:
        # Independent of the umask: a file that others can write is rejected.
        path.chmod(0o644)
        pack(file, make_room)
        # Opened before it is published: on some network file systems our own files appear to be another user's.
        packed = PackedFile(file, target / WEIGHTS, key=key.digest)
    name = f"packed/{key.digest[:12]}"
    records = {WEIGHTS: FileRecord(path.stat().st_size)}
    store.publish_packed(files, target, Manifest(key.source, name, time.time(), records, key.variant))
    if (held := hold(target)) is not None:
        weakref.finalize(packed, held.close)
    return packed


def _pack_for_now(key: PackedKey, pack: Pack, reason: str) -> PackedFile:
    if (file := _temporary_file()) is not None:
        with file:
            try:
                packed = _packed_into(file, Path(tempfile.gettempdir(), "unnamed"), key, pack)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
            else:
                _log.warning(
                    "%s Until then weights are packed at every start, into an unnamed file in %s that is gone with "
                    "this process.",
                    reason,
                    tempfile.gettempdir(),
                )
                return packed
    _log.warning(
        "%s Until then weights are packed at every start, into memory: there is no room for temporary files either. "
        "Set TMPDIR to a directory that has some.",
        reason,
    )
    with open(_memory_file(), "w+b") as file:
        return _packed_into(file, Path("memory"), key, pack)


def _temporary_file() -> BinaryIO | None:
    """None if no directory takes one."""
    with suppress(OSError):
        return cast(BinaryIO, tempfile.TemporaryFile())
    return None


def _packed_into(file: BinaryIO, path: Path, key: PackedKey, pack: Pack) -> PackedFile:
    pack(file, lambda nbytes: None)
    return PackedFile(file, path, key=key.digest)


def _memory_file() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory")
    return os.memfd_create("ostro-weights")


__all__ = ["WEIGHTS", "with_packed_weights"]

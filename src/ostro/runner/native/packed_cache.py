"""Packed weights in the cache of models: found, checked and held, or made. Knows files and room; knows no structure.

ROOT/packed/DIGEST.lock      held by the one process that packs; the others wait and then find the file
ROOT/packed/DIGEST/          weights.ostro and its manifest; appears by rename, and is held as long as it is mapped

What cannot be used is moved aside and made again: a file that is damaged or that another user could have written, and
one that a process died of while it was put to use. Where the cache has no room, or cannot be written, weights are
packed into a file without a name that is gone with the process.
"""

import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from ostro.errors import BadCheckpoint, DiskFull, DownloadFailed
from ostro.kernels.cpu.packed_file import BadPackedFile, PackedFile
from ostro.runner.native.identity import PackedKey
from ostro.sources.cache import work_directory
from ostro.sources.disk_space import cache_limit
from ostro.sources.locks import has_dead_mark, hold, marked
from ostro.sources.store import FileRecord, Manifest, ModelStore

WEIGHTS = "weights.ostro"

Pack = Callable[[BinaryIO, Callable[[int], None]], None]
"""Writes packed weights into a file. It says how many bytes they will take before it writes any."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def with_packed_weights(key: PackedKey, pack: Pack, use: Callable[[PackedFile], T]) -> T:
    """What `use` makes of the weights that were packed for this key before, or that `pack` packs now.

    Where `use` finds old weights to be bad they are packed anew, and used once more. All else that `pack` and `use`
    raise comes out, and an OSError where there is no room for the weights anywhere.
    """
    store = ModelStore()
    target = store.packs / key.digest
    if isinstance(found := _use_kept(target, key, use), _Used):
        return found.value
    try:
        with work_directory(target, doing="the packing") as work:
            # Another process may have been faster.
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
    """None where nothing was packed before."""
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
        # Nobody deletes it as long as it is mapped.
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
            # From here on it counts as large as it will be, for whoever makes room next.
            os.truncate(path, nbytes)

    with path.open("w+b") as file:
        # Whatever the umask: a file that others can write is not used.
        path.chmod(0o644)
        pack(file, make_room)
        # Before it has its place: on some network disks our own files look like another user's.
        packed = PackedFile(file, target / WEIGHTS, key=key.digest)
    name = f"packed/{key.digest[:12]}"
    records = {WEIGHTS: FileRecord(path.stat().st_size)}
    store.publish_packed(files, target, Manifest(key.source, name, time.time(), records, key.variant))
    if (held := hold(target)) is not None:
        weakref.finalize(packed, held.close)
    return packed


def _pack_for_now(key: PackedKey, pack: Pack, reason: str) -> PackedFile:
    directory = tempfile.gettempdir()
    _log.warning(
        "%s Until then weights are packed at every start, into an unnamed file in %s that is gone with this process.",
        reason,
        directory,
    )
    with tempfile.TemporaryFile(dir=directory) as file:
        pack(file, lambda nbytes: None)
        return PackedFile(file, Path(directory, "unnamed"), key=key.digest)


__all__ = ["WEIGHTS", "with_packed_weights"]

"""Pages that engines leave to one another, in a directory that all of them can reach. Knows no engine.

    DIR/IDENTITY/TIME-RANDOM.pages     a bundle: a file of `page_file`, written once

A bundle gets its name when it is whole, and never changes. The oldest make room for new ones. Whoever can write there
can make engines say anything, so that files of other users, or that others can write, are not used.

`holds` and `len` are safe from any thread; the rest belongs to one.
"""

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.file_trust import why_untrusted
from ostro.runner.page_file import PageFile, PageFileUnusable, file_bytes, pages_within

Bytes = npt.NDArray[np.uint8]

_SUFFIX = ".pages"
_UNFINISHED = ".part"
# What a writer that died has left is removed after this time.
_UNFINISHED_SECONDS = 3600.0
# A listing is believed for so long if the directory says that it has not changed: object stores that are mounted as
# file systems do not tell. Clocks of file systems tick slowly, so that a change may have the time of the one before.
_BELIEVED_SECONDS = 5.0
_TICK_SECONDS = 0.1

_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    bundle: str
    record: int


class PageBundles:
    def __init__(self, directory: Path, *, identity: bytes, page_bytes: int, limit: int) -> None:
        """The bundles of one model with its settings (`identity`) take up to `limit` bytes. Raises PageFileUnusable."""
        self.page_bytes, self._identity, self._limit = page_bytes, identity, limit
        self.most_pages = pages_within(limit, page_bytes)
        """In one bundle."""
        self.directory = directory / identity.hex()
        self._places: dict[bytes, _Place] = {}
        self._bundles: dict[str, tuple[bytes, ...]] = {}
        """What each has; nothing if it cannot be used."""
        self._reading: tuple[str, PageFile] | None = None
        """The bundle that was read last stays open: the next page is usually there."""
        self._changed, self._listed = 0, 0.0
        self._has_failed = False
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.look()
        except OSError as error:
            raise PageFileUnusable(f"{directory} cannot take pages ({error.strerror or error})") from error

    def __len__(self) -> int:
        return len(self._places)

    def holds(self, digest: bytes) -> bool:
        return digest in self._places

    def look(self) -> None:
        """Finds out which bundles there are. Raises OSError if the directory cannot be read."""
        changed = self.directory.stat().st_mtime_ns
        if changed == self._changed and time.monotonic() - self._listed < _BELIEVED_SECONDS:
            return
        settled = changed < time.time_ns() - _TICK_SECONDS * 1e9
        self._changed, self._listed = changed if settled else 0, time.monotonic()
        names = {name for name in os.listdir(self.directory) if name.endswith(_SUFFIX)}
        for name in self._bundles.keys() - names:
            self._forget(name)
        for name in sorted(names - self._bundles.keys()):
            self._take_up(name)

    def read(self, digest: bytes, into: memoryview) -> bool:
        """Whether there is such a page, and whole: if not, nobody may use what it has left in `into`."""
        place = self._places.get(digest)
        if place is None:
            return False
        file = self._opened(place.bundle)
        if file is not None and file.read(place.record, digest, into):
            return True
        self._places.pop(digest, None)
        return False

    def close(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None

    def write(self, pages: Sequence[tuple[bytes, Bytes]]) -> int:
        """Leaves these pages to others, as one bundle. Returns how many, from the first on: none if the disk is full,
        which is logged once.
        """
        pages = pages[: self.most_pages]
        if not pages:
            return 0
        name = f"{time.time_ns():020d}-{secrets.token_hex(6)}{_SUFFIX}"
        try:
            self._make_room(file_bytes(len(pages), self.page_bytes))
            self._write(name, pages)
        except OSError as error:
            if not self._has_failed:
                _log.warning("no prefixes are left to other engines in %s: %s", self.directory, error)
            self._has_failed = True
            return 0
        self._has_failed = False
        self._note(name, tuple(digest for digest, _ in pages), range(len(pages)))
        return len(pages)

    def _write(self, name: str, pages: Sequence[tuple[bytes, Bytes]]) -> None:
        descriptor, unfinished = tempfile.mkstemp(suffix=_UNFINISHED, dir=self.directory)
        file = self._file(descriptor, file_bytes(len(pages), self.page_bytes))
        try:
            file.prepare()
            for record, (digest, page) in enumerate(pages):
                file.write(record, digest, record, page.data)
            os.rename(unfinished, self.directory / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            file.close()

    def _make_room(self, wanted: int) -> None:
        """Removes the oldest bundles, whose names begin with their time."""
        whole, now = [], time.time()
        for entry in os.scandir(self.directory):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    whole.append((entry.name, status.st_size))
                elif entry.name.endswith(_UNFINISHED) and now - status.st_mtime > _UNFINISHED_SECONDS:
                    os.unlink(entry.path)
        used = wanted + sum(size for _, size in whole)
        for name, size in sorted(whole):
            if used <= self._limit:
                return
            with suppress(FileNotFoundError):
                os.unlink(self.directory / name)
            self._forget(name)
            used -= size

    def _take_up(self, name: str) -> None:
        file = self._open(name)
        if file is None:
            self._bundles[name] = ()
            return
        try:
            found = sorted(file.found())
        finally:
            file.close()
        self._note(name, tuple(each.digest for each in found), [each.record for each in found])

    def _note(self, name: str, digests: tuple[bytes, ...], records: Sequence[int]) -> None:
        self._bundles[name] = digests
        for digest, record in zip(digests, records, strict=True):
            self._places[digest] = _Place(name, record)

    def _forget(self, name: str) -> None:
        if self._reading is not None and self._reading[0] == name:
            self.close()
        for digest in self._bundles.pop(name, ()):
            place = self._places.get(digest)
            if place is not None and place.bundle == name:
                del self._places[digest]

    def _opened(self, name: str) -> PageFile | None:
        if self._reading is None or self._reading[0] != name:
            self.close()
            file = self._open(name)
            self._reading = None if file is None else (name, file)
        return None if self._reading is None else self._reading[1]

    def _open(self, name: str) -> PageFile | None:
        """None if the bundle is gone or must not be used."""
        path = self.directory / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            reason = why_untrusted(descriptor, group_may_write=False)
            file = self._file(descriptor, min(self._limit, os.fstat(descriptor).st_size))
            if reason is None and not file.is_ours():
                reason = "is damaged"
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        if reason is None:
            return file
        _log.warning("%s %s: it is not used", path, reason)
        os.close(descriptor)
        return None

    def _file(self, descriptor: int, limit: int) -> PageFile:
        return PageFile(descriptor, identity=self._identity, page_bytes=self.page_bytes, limit=limit)

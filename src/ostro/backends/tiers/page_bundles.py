"""Pages that engines share, in a directory that all of them can reach. Knows no engine.

    DIR/IDENTITY/RANDOM.pages     a bundle: a file of `page_file` with an index, written once

A bundle gets its name once it is complete, and never changes. The oldest are deleted to make room. Whoever can write
there controls what engines answer, so a directory or file that others own or can write is not used.

`holds` and `len` are safe from any thread; the rest belongs to one.
"""

import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ostro.backends.tiers.page_file import Bytes, PageFile, PageFileUnusable, file_bytes, pages_within
from ostro.system.file_trust import why_untrusted

# Files of any other name are left alone.
_NAME = re.compile(r"[0-9a-f]{24}\.pages")
_UNFINISHED = re.compile(r"[0-9a-f]{24}\.part")
# Unfinished files of dead writers are removed after this time.
_UNFINISHED_SECONDS = 3600.0
# While the directory's mtime is unchanged, a listing is trusted for this long: object stores mounted as file systems do
# not update it. File system clocks tick slowly, so two changes may have the same mtime.
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
        """Pages per bundle, at most."""
        self.directory = directory / identity.hex()
        self._places: dict[bytes, _Place] = {}
        self._bundles: dict[str, tuple[bytes, ...]] = {}
        """The digests in each bundle; empty for one that must not be used."""
        self._reading: tuple[str, PageFile] | None = None
        """The bundle that was read last. It stays open, because it usually has the next page."""
        self._changed, self._listed = 0, 0.0
        self._is_full = False
        try:
            self.look()
        except OSError as error:
            raise PageFileUnusable(f"{self.directory} cannot take pages ({error.strerror or error})") from error

    def __len__(self) -> int:
        return len(self._places)

    def holds(self, digest: bytes) -> bool:
        return digest in self._places

    def look(self, *, thoroughly: bool = False) -> None:
        """Lists the bundles again; `thoroughly`, even if the directory's mtime is unchanged. Raises OSError if the
        directory cannot be used.
        """
        with self._entered() as place:
            changed = os.fstat(place).st_mtime_ns
            is_old = time.monotonic() - self._listed > _BELIEVED_SECONDS
            if changed == self._changed and not is_old and not thoroughly:
                return
            settled = changed < time.time_ns() - _TICK_SECONDS * 1e9
            self._changed, self._listed = changed if settled else 0, time.monotonic()
            names = {name for name in os.listdir(place) if _NAME.fullmatch(name)}
            for name in self._bundles.keys() - names:
                self._forget(name)
            for name in sorted(names - self._bundles.keys()):
                # One that cannot be read now, for whatever reason, is tried again next time.
                with suppress(OSError):
                    self._take_up(place, name)

    def read(self, digest: bytes, into: memoryview) -> bool:
        """Whether the page was found intact. If not, the contents of `into` must not be used."""
        found = self._places.get(digest)
        if found is None:
            return False
        try:
            file = self._opened(found.bundle)
        except OSError:
            file = None
        if file is not None and file.read(found.record, digest, into):
            return True
        if file is not None:
            _log.warning("%s is damaged and was removed", self.directory / found.bundle)
            with suppress(OSError), self._entered() as place:
                os.unlink(found.bundle, dir_fd=place)
        self._forget(found.bundle)
        return False

    def write(self, pages: Sequence[tuple[bytes, Bytes]]) -> int:
        """Shares these pages as one bundle. Returns how many, from the first on: 0 if the disk is full, which is logged
        once.
        """
        pages = pages[: self.most_pages]
        if not pages:
            return 0
        try:
            with self._entered() as place:
                name = self._write(place, pages)
        except OSError as error:
            if not self._is_full:
                _log.warning("no prefixes are shared in %s: %s. Free some space there.", self.directory, error)
            self._is_full = True
            return 0
        self._is_full = False
        self._note(name, tuple(digest for digest, _ in pages))
        return len(pages)

    def close(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None

    def _write(self, place: int, pages: Sequence[tuple[bytes, Bytes]]) -> str:
        stem, size = secrets.token_hex(12), file_bytes(len(pages), self.page_bytes)
        name, unfinished = f"{stem}.pages", f"{stem}.part"
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
        file = self._file(descriptor, size)
        try:
            # The file system's clock, which all who share it agree on.
            self._make_room(place, size, now=os.fstat(descriptor).st_mtime)
            file.prepare()
            for record, (digest, page) in enumerate(pages):
                file.write(record, digest, record, page.data)
            file.write_index([digest for digest, _ in pages])
            os.rename(unfinished, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=place)
            raise
        finally:
            file.close()
        return name

    def _make_room(self, place: int, wanted: int, *, now: float) -> None:
        whole = []
        with os.scandir(place) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name):
                        whole.append((status.st_mtime_ns, entry.name, status.st_size))
                    elif _UNFINISHED.fullmatch(entry.name) and now - status.st_mtime > _UNFINISHED_SECONDS:
                        os.unlink(entry.name, dir_fd=place)
        used = wanted + sum(size for *_, size in whole)
        for _, name, size in sorted(whole):
            if used <= self._limit:
                return
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place)
            self._forget(name)
            used -= size

    def _take_up(self, place: int, name: str) -> None:
        """Raises OSError if the bundle cannot be read now."""
        file = self._open(place, name)
        if file is None:
            self._bundles[name] = ()
            return
        try:
            digests = file.read_index()
        finally:
            file.close()
        if digests is None:
            _log.warning("%s is damaged: it is not used", self.directory / name)
        self._note(name, digests or ())

    def _note(self, name: str, digests: tuple[bytes, ...]) -> None:
        self._bundles[name] = digests
        for record, digest in enumerate(digests):
            self._places[digest] = _Place(name, record)

    def _forget(self, name: str) -> None:
        if self._reading is not None and self._reading[0] == name:
            self.close()
        gone = {digest for digest in self._bundles.pop(name, ()) if self._places[digest].bundle == name}
        for digest in gone:
            del self._places[digest]
        # Other bundles may have some of them as well.
        for other, digests in self._bundles.items() if gone else ():
            for record, digest in enumerate(digests):
                if digest in gone:
                    self._places[digest] = _Place(other, record)

    def _opened(self, name: str) -> PageFile | None:
        if self._reading is None or self._reading[0] != name:
            self.close()
            with self._entered() as place:
                file = self._open(place, name)
            self._reading = None if file is None else (name, file)
        return None if self._reading is None else self._reading[1]

    def _open(self, place: int, name: str) -> PageFile | None:
        """None if it must not be used. Raises OSError if it is gone, or cannot be read now."""
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
        try:
            reason = why_untrusted(descriptor, group_may_write=False)
            file = self._file(descriptor, self._limit)
            if reason is None and not file.is_ours():
                reason = "is damaged"
        except BaseException:
            os.close(descriptor)
            raise
        if reason is None:
            return file
        _log.warning("%s %s: it is not used", self.directory / name, reason)
        os.close(descriptor)
        return None

    def _file(self, descriptor: int, limit: int) -> PageFile:
        return PageFile(descriptor, identity=self._identity, page_bytes=self.page_bytes, limit=limit)

    @contextmanager
    def _entered(self) -> Iterator[int]:
        """The directory's descriptor; creates the directory if needed. Raises OSError if others could write to it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise OSError(f"{self.directory} belongs to another user, or others can write to it")
            yield descriptor
        finally:
            os.close(descriptor)

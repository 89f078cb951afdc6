"""An unfinished download on disk: records which ranges of which generation have arrived. Survives a crash.

NAME.partial/files/…     sparse files of the final size
NAME.partial/journal     one line per completed range: [file, generation, start, end]

A line is written only after its range is synced to disk, so a power loss never makes a hole pass for data.
Knows no stores and no checksums. The caller holds the lock: one process at a time uses it.
"""

import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ostro.sources.base import ObjectInfo, Transient
from ostro.sources.cache import sync

BLOCK_BYTES = 8 << 20
Range = tuple[int, int]


class Partial:
    """Files being downloaded, keyed by path within the model. Ranges may be written from several threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = directory / "files"
        self._journal = directory / "journal"
        self._lock = threading.Lock()
        self._arrived: dict[tuple[str, str], set[Range]] = defaultdict(set)
        self._read_journal()

    def prepare(self, wanted: dict[str, ObjectInfo]) -> None:
        """Creates sparse files for `wanted`; deletes files of other names or other generations."""
        self.files.mkdir(parents=True, exist_ok=True)
        for path in [path for path in self.files.rglob("*") if not path.is_dir()]:
            name = path.relative_to(self.files).as_posix()
            info = wanted.get(name)
            if info is None or not self._arrived.get((name, info.generation)) or path.stat().st_size != info.size:
                self.forget(name)
        for name, info in wanted.items():
            path = self.files / name
            if not path.exists():
                self.forget(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    file.truncate(info.size)

    def missing(self, name: str, info: ObjectInfo) -> list[Range]:
        arrived = self._arrived[name, info.generation]
        blocks = ((start, min(start + BLOCK_BYTES, info.size)) for start in range(0, info.size, BLOCK_BYTES))
        return [] if (0, info.size) in arrived else [block for block in blocks if block not in arrived]

    def write(self, name: str, info: ObjectInfo, block: Range, pieces: Iterable[bytes]) -> Iterator[int]:
        """Writes the pieces and records the range once it is complete. Yields the size of each piece."""
        start, end = block
        descriptor = os.open(self.files / name, os.O_WRONLY)
        try:
            for piece in pieces:
                if start + len(piece) > end:
                    raise Transient("more bytes arrived than were requested")
                _write_at(descriptor, piece, start)
                start += len(piece)
                yield len(piece)
            if start != end:
                raise Transient(f"the answer ended {end - start} bytes early")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._record(name, info.generation, *block)

    def adopt(self, name: str, info: ObjectInfo, file: Path) -> None:
        """Adopts an already complete file, as a hard link where the file system allows."""
        target = self.files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self.forget(name)
        try:
            os.link(file, target)
        except OSError:
            shutil.copyfile(file, target)
            sync(target)
        self._record(name, info.generation, 0, info.size)

    def forget(self, name: str) -> None:
        # Unlinked, never overwritten in place: it may be a hard link to a file in use.
        (self.files / name).unlink(missing_ok=True)
        with self._lock:
            for key in [key for key in self._arrived if key[0] == name]:
                del self._arrived[key]
        self._append([name])
        # Synced before a new file takes this name: otherwise the old ranges would be attributed to it.
        sync(self._journal)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _record(self, name: str, generation: str, start: int, end: int) -> None:
        with self._lock:
            self._arrived[name, generation].add((start, end))
        self._append([name, generation, start, end])

    def _append(self, line: list[object]) -> None:
        with self._journal.open("ab", buffering=0) as journal:
            journal.write(b"\n" + json.dumps(line).encode())

    def _read_journal(self) -> None:
        """Skips a line that was cut off by a crash: its range is fetched again."""
        if not self._journal.exists():
            return
        for line in self._journal.read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError):
                match json.loads(line):
                    case [str(name), str(generation), int(start), int(end)]:
                        self._arrived[name, generation].add((start, end))
                    case [str(name)]:
                        for key in [key for key in self._arrived if key[0] == name]:
                            del self._arrived[key]


def _write_at(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written

"""Disk usage of the cache: bytes taken, bytes still to be downloaded, bytes that evictions would free.

Hard links are counted once: versions of a model share unchanged files. An active download counts at its final size, an
abandoned one at its current size.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadRequest

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}

_Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A directory that takes up space: a model or a download."""

    path: Path
    files: tuple[os.stat_result, ...]
    is_whole: bool
    is_idle: bool
    """Whether it may be evicted."""

    @classmethod
    def of(cls, path: Path, *, is_whole: bool, is_idle: bool) -> "Tenant":
        return cls(path, tuple(_files(path)), is_whole, is_idle)

    def size(self, file: os.stat_result) -> int:
        return file.st_size if self.is_whole or not self.is_idle else _present(file)

    def to_come(self, file: os.stat_result) -> int:
        # A hard link comes from an older version, so the file is already complete.
        done = self.is_whole or self.is_idle or file.st_nlink > 1
        return 0 if done else file.st_size - _present(file)


def cache_limit() -> int | None:
    """`OSTRO_CACHE_LIMIT` in bytes: the cache's maximum size. None means no limit but the disk."""
    text = os.environ.get("OSTRO_CACHE_LIMIT", "").strip()
    if not text:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BadRequest(f"OSTRO_CACHE_LIMIT={text!r} is not a size. Write 50G or 800M.")
    return int(float(match["number"]) * (1 << _UNITS[match["unit"].lower()]))


def size_of(directory: Path) -> int:
    return sum(file.st_size for file in _files(directory))


def free_bytes(path: Path) -> int:
    path = path.absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free


def taken(tenants: Iterable[Tenant]) -> int:
    """Their total size once all active downloads have finished."""
    sizes: dict[_Inode, int] = {}
    for tenant in tenants:
        for file in tenant.files:
            sizes[_inode(file)] = max(sizes.get(_inode(file), 0), tenant.size(file))
    return sum(sizes.values())


def to_come(tenants: Iterable[Tenant]) -> int:
    """Disk space that active downloads have yet to use."""
    return sum(tenant.to_come(file) for tenant in tenants for file in tenant.files)


def fewest(tenants: Sequence[Tenant], shortage: int) -> list[Tenant] | None:
    """The shortest prefix of `tenants` whose removal frees `shortage` bytes. None if removing all is not enough."""
    for count in range(1, len(tenants) + 1):
        if _freed(tenants[:count]) >= shortage:
            return list(tenants[:count])
    return None


def _freed(tenants: Sequence[Tenant]) -> int:
    """A file's blocks are only freed when its last hard link goes."""
    sizes = {_inode(file): (tenant.size(file), file.st_nlink) for tenant in tenants for file in tenant.files}
    names = Counter(_inode(file) for tenant in tenants for file in tenant.files)
    return sum(size for inode, (size, num_names) in sizes.items() if names[inode] == num_names)


def _inode(file: os.stat_result) -> _Inode:
    return file.st_dev, file.st_ino


def _present(file: os.stat_result) -> int:
    """Downloads in progress are sparse files of the final size."""
    return min(file.st_size, file.st_blocks * 512)


def _files(directory: Path) -> Iterator[os.stat_result]:
    """The files of a model or download; hidden ones are our own small bookkeeping files."""
    for path in directory.rglob("[!.]*"):
        with suppress(OSError):
            if path.is_file():
                yield path.stat()

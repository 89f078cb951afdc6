"""How much of the disk the cache takes, what is still to come, and what would be free without some of it.

Files are counted once however many names they have: versions of a model share those that did not change. A download
under way counts as large as it will be; one that nobody goes on with, as large as it is.
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
    """A directory that takes room: a model, or a download."""

    path: Path
    files: tuple[os.stat_result, ...]
    is_whole: bool
    is_idle: bool
    """Whether it may go."""

    @classmethod
    def of(cls, path: Path, *, is_whole: bool, is_idle: bool) -> "Tenant":
        return cls(path, tuple(_files(path)), is_whole, is_idle)

    def size(self, file: os.stat_result) -> int:
        return file.st_size if self.is_whole or not self.is_idle else _present(file)

    def to_come(self, file: os.stat_result) -> int:
        # What has another name is that of an older version, and whole.
        done = self.is_whole or self.is_idle or file.st_nlink > 1
        return 0 if done else file.st_size - _present(file)


def cache_limit() -> int | None:
    """`OSTRO_CACHE_LIMIT` in bytes: how large the cache may grow. None is as large as the disk."""
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
    """What they take together, once all downloads under way are done."""
    sizes: dict[_Inode, int] = {}
    for tenant in tenants:
        for file in tenant.files:
            sizes[_inode(file)] = max(sizes.get(_inode(file), 0), tenant.size(file))
    return sum(sizes.values())


def to_come(tenants: Iterable[Tenant]) -> int:
    """What downloads under way will still take of the disk."""
    return sum(tenant.to_come(file) for tenant in tenants for file in tenant.files)


def fewest(tenants: Sequence[Tenant], shortage: int) -> list[Tenant] | None:
    """The first of them, as many as must go to make so much room. None if all are not enough."""
    for count in range(1, len(tenants) + 1):
        if _freed(tenants[:count]) >= shortage:
            return list(tenants[:count])
    return None


def _freed(tenants: Sequence[Tenant]) -> int:
    """A file is gone only with the last of its names."""
    sizes = {_inode(file): (tenant.size(file), file.st_nlink) for tenant in tenants for file in tenant.files}
    names = Counter(_inode(file) for tenant in tenants for file in tenant.files)
    return sum(size for inode, (size, num_names) in sizes.items() if names[inode] == num_names)


def _inode(file: os.stat_result) -> _Inode:
    return file.st_dev, file.st_ino


def _present(file: os.stat_result) -> int:
    """A download's files are as large as they will be from the start, but have holes."""
    return min(file.st_size, file.st_blocks * 512)


def _files(directory: Path) -> Iterator[os.stat_result]:
    """Those of a model or a download; hidden ones are ours, and small."""
    for path in directory.rglob("[!.]*"):
        with suppress(OSError):
            if path.is_file():
                yield path.stat()

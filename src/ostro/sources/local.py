"""The files of a directory, listed as a store lists objects. Its models are opened where they are, never fetched."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ostro.sources.base import ObjectInfo


def list_directory(root: Path, depth: int) -> Iterator[ObjectInfo]:
    """Files down to that many directories below the root; links are followed, hidden ones and unreadable ones left."""
    yield from _below(root, "", depth)


def _below(directory: Path, prefix: str, depth: int) -> Iterator[ObjectInfo]:
    try:
        found = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        if entry.name.startswith("."):
            continue
        # It may have gone, or be a link to itself.
        with suppress(OSError):
            if entry.is_file():
                status = entry.stat()
                yield ObjectInfo(prefix + entry.name, status.st_size, str(status.st_mtime_ns))
            elif depth and entry.is_dir():
                yield from _below(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)

"""Reads and writes files given on the command line, so that a failure leaves nothing half-written."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ostro.errors import NO_ROOM, BadRequest, DiskFull


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The file's non-blank lines with their numbers. Only newlines end a line, as in JSON Lines."""
    lines = enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1)
    return [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]


def read_text(path: Path) -> str:
    """The file's text; `-` is standard input."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"Cannot read {path}: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path} is not UTF-8 text (byte {error.start}). Convert it first.") from error


@contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A file that appears under its name only once it is completely written.

    Follows links; writes to pipes and devices directly. A directory is refused before any work is done.
    """
    path = path.resolve()
    if path.is_dir():
        raise BadRequest(f"Cannot write {path}: it is a directory. Name a file in it.")
    special = path.exists() and not path.is_file()
    partial = path if special else path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        if not special:
            partial.replace(path)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(f"No space left to write {path}. Free some, or choose another location.") from error
        raise BadRequest(f"Cannot write {path}: {error.strerror}. Check the path.") from error
    finally:
        if not special:
            partial.unlink(missing_ok=True)

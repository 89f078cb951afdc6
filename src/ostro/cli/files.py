"""Reading and writing the files that commands are given, so that a failure leaves nothing half-written."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ostro.errors import BadRequest, DiskFull

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
    """A file that appears under its name only once everything was written to it."""
    partial = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(f"No room left to write {path}. Free some space or choose another place.") from error
        raise BadRequest(f"Cannot write {path}: {error.strerror}. Check the path.") from error
    finally:
        partial.unlink(missing_ok=True)

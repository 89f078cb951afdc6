"""What a file's bytes add up to. CRC32C is what both stores give; it is fast, and finds every small damage."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from ostro.errors import Unsupported
from ostro.sources.base import ObjectInfo

_CHUNK_BYTES = 4 << 20


def crc32c_of(path: Path) -> str:
    return _read(path, with_md5=False)[0]


def check(path: Path, info: ObjectInfo) -> tuple[str, str | None]:
    """The file's CRC32C, and what speaks against its being the object: None if nothing does."""
    crc32c, md5 = _read(path, with_md5=info.crc32c is None and info.md5 is not None)
    if (size := path.stat().st_size) != info.size:
        return crc32c, f"it has {size} bytes instead of {info.size}"
    if info.crc32c not in (None, crc32c):
        return crc32c, f"its CRC32C is {crc32c} instead of {info.crc32c}"
    if md5 != info.md5 and md5 is not None:
        return crc32c, f"its MD5 is {md5} instead of {info.md5}"
    return crc32c, None


def _read(path: Path, *, with_md5: bool) -> tuple[str, str | None]:
    try:
        from google_crc32c import Checksum
    except ImportError as error:
        raise Unsupported(
            "Checking a model's files needs a library. Run: pip install google-crc32c", param="model"
        ) from error
    # The library has no types.
    crc32c: Any = Checksum()  # type: ignore[no-untyped-call]
    md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc32c.update(chunk)
            if md5 is not None:
                md5.update(chunk)
    return base64.b64encode(crc32c.digest()).decode(), md5.hexdigest() if md5 is not None else None

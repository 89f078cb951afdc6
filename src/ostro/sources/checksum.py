"""File checksums. Every cached file has a CRC32C, which is fast and detects any small corruption. Stores report it or
another algorithm, for the whole object or for its parts.
"""

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from ostro.errors import Unsupported
from ostro.sources.base import Algorithm, Checksum, ObjectInfo

_CHUNK_BYTES = 4 << 20


class _Sum(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def crc32c_of(path: Path) -> str:
    """Base64 of the four bytes, the stores' notation."""
    with path.open("rb") as file:
        crc32c = _crc32c()
        while chunk := file.read(_CHUNK_BYTES):
            crc32c.update(chunk)
    return _text(crc32c.digest())


def sha256_of(path: Path) -> str:
    """In hexadecimal, the notation of package indexes and the Hub."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, info: ObjectInfo) -> tuple[str, str | None]:
    """The file's CRC32C, and a description of the mismatch with the object: None if they match."""
    expected = info.checksum
    assert expected is not None, "only files with a checksum are fetched"
    if (size := path.stat().st_size) != info.size:
        return "", f"it has {size} bytes instead of {info.size}"
    crc32c, digest = _digests(path, size, expected)
    if digest != expected.digest:
        return crc32c, f"its {expected.algorithm.upper()} is {_text(digest)} instead of {_text(expected.digest)}"
    return crc32c, None


def _digests(path: Path, size: int, expected: Checksum) -> tuple[str, bytes]:
    new = _SUMS[expected.algorithm]
    crc32c, digests = _crc32c(), []
    with path.open("rb") as file:
        for part_size in expected.part_sizes or (size,):
            part = new()
            for chunk in _chunks(file, part_size):
                crc32c.update(chunk)
                part.update(chunk)
            digests.append(part.digest())
    if not expected.part_sizes:
        return _text(crc32c.digest()), digests[0]
    whole = new()
    whole.update(b"".join(digests))
    return _text(crc32c.digest()), whole.digest()


def _chunks(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes and (chunk := file.read(min(num_bytes, _CHUNK_BYTES))):
        num_bytes -= len(chunk)
        yield chunk


def _text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _crc32c() -> _Sum:
    try:
        from google_crc32c import Checksum as Crc32c
    except ImportError as error:
        raise Unsupported(
            "Checking a model's files needs a library. Run: pip install google-crc32c", param="model"
        ) from error
    # The library has no type hints.
    return cast(_Sum, Crc32c())  # type: ignore[no-untyped-call]


def _crc64() -> _Sum:
    from ostro.sources.crc64 import Crc64

    return Crc64()


_SUMS: dict[Algorithm, Callable[[], _Sum]] = {
    "crc32c": _crc32c,
    "crc32": _Crc32,
    "crc64nvme": _crc64,
    "sha256": hashlib.sha256,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "md5": lambda: hashlib.md5(usedforsecurity=False),
}

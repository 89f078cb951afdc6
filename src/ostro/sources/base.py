"""The object-store interface and its retry policy. Imports no store's client library."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from ostro.errors import DownloadFailed

CONNECT_SECONDS = 10.0
# A connection that delivers no bytes for this long counts as dead.
READ_SECONDS = 30.0
LEAST_BYTES_A_SECOND = 4096
ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 8.0
PASSING_STATUSES = frozenset((408, 429, 500, 502, 503, 504))

Algorithm = Literal["crc32c", "crc32", "crc64nvme", "sha256", "sha1", "md5"]
T = TypeVar("T")

# A separate generator: drawing jitter must not disturb a seeded global one.
_jitter = random.Random()


class Transient(Exception):
    """A temporary failure of the store; retrying may help."""


class ObjectChanged(Exception):
    """The object was overwritten or deleted after it was listed."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """An object's checksum as reported by the store."""

    algorithm: Algorithm
    digest: bytes
    part_sizes: tuple[int, ...] = ()
    """For a multipart upload; the digest is then computed over the concatenated digests of the parts."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    generation: str
    """Changes whenever the content does: GCS's generation, S3's ETag."""
    checksum: Checksum | None = None
    encoding: str | None = None
    """The object's Content-Encoding, if its stored bytes are compressed."""


class Source(Protocol):
    """One bucket. Thread-safe.

    All methods raise Transient for temporary failures, ModelNotFound if the bucket or object does not exist, and
    DownloadFailed for errors that retrying cannot fix.
    """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects with this key prefix, at any depth. May lack checksums and encodings; `stat` has them."""

    def stat(self, key: str) -> ObjectInfo: ...

    def read(self, key: str, generation: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes [start, end) of exactly this generation; ObjectChanged if the object now has another."""


def with_retries(what: str, attempt: Callable[[], T], *, wait: Callable[[float], object] = time.sleep) -> T:
    """Runs `attempt`, retrying on Transient with exponential backoff up to ATTEMPTS times.

    `wait` may raise to give up early.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except Transient as error:
            reason = error
        if number + 1 < ATTEMPTS:
            # Jitter, so that clients that failed together do not retry together.
            wait(min(FIRST_WAIT_SECONDS * 2**number, LONGEST_WAIT_SECONDS) * _jitter.uniform(0.5, 1.0))
    raise DownloadFailed(
        f"{what} failed {ATTEMPTS} times ({reason}). Check the network, then start again: what has arrived is kept."
    ) from reason


def read_steadily(read: Callable[[], bytes], window: float) -> Iterator[bytes]:
    """Yields from `read` until it returns nothing. Transient if too few bytes arrive within `window` seconds."""
    waited, num_bytes = 0.0, 0
    while True:
        started = time.monotonic()
        piece = read()
        waited += time.monotonic() - started
        num_bytes += len(piece)
        if not piece:
            return
        if waited >= window:
            if num_bytes < LEAST_BYTES_A_SECOND * waited:
                raise Transient(f"only {num_bytes} bytes arrived in {waited:.0f} seconds")
            waited, num_bytes = 0.0, 0
        yield piece

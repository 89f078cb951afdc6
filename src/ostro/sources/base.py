"""What the rest of Ostro knows of an object store, and how patiently it is asked. Knows no store's client."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from ostro.errors import DownloadFailed

CONNECT_SECONDS = 10.0
# Without a single byte for so long, a connection counts as dead.
READ_SECONDS = 30.0
LEAST_BYTES_A_SECOND = 4096
ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 8.0
PASSING_STATUSES = frozenset((408, 429, 500, 502, 503, 504))

Algorithm = Literal["crc32c", "crc32", "crc64nvme", "sha256", "sha1", "md5"]
T = TypeVar("T")

# Of our own: threads that wait must not disturb whoever seeded the global generator.
_jitter = random.Random()


class Transient(Exception):
    """A store failed in a way that may pass: worth another try."""


class ObjectChanged(Exception):
    """The object is no longer the one that was listed: it was overwritten or deleted."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """What an object's bytes add up to."""

    algorithm: Algorithm
    digest: bytes
    part_sizes: tuple[int, ...] = ()
    """Of an object that came in parts; then the digest is that of the parts' digests, one after another."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    generation: str
    """Changes whenever the content does: GCS's generation, S3's ETag."""
    checksum: Checksum | None = None
    encoding: str | None = None
    """How the stored bytes are packed, if they are: the Content-Encoding."""


class Source(Protocol):
    """One bucket. Safe to use from several threads.

    All raise Transient for what may pass, ModelNotFound for a bucket or an object that is not there, and
    DownloadFailed for what no repetition mends.
    """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose keys start so, at any depth. Checksums and encodings may be missing: `stat` has them."""

    def stat(self, key: str) -> ObjectInfo: ...

    def read(self, key: str, generation: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` up to `end`, of that generation only; ObjectChanged if there is another."""


def patiently(what: str, attempt: Callable[[], T], *, wait: Callable[[float], object] = time.sleep) -> T:
    """The attempt's result; what may pass is tried again, ever later, up to a bound.

    `wait` may raise to give up early.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except Transient as error:
            reason = error
        if number + 1 < ATTEMPTS:
            # Many who failed together should not come back together.
            wait(min(FIRST_WAIT_SECONDS * 2**number, LONGEST_WAIT_SECONDS) * _jitter.uniform(0.5, 1.0))
    raise DownloadFailed(
        f"{what} failed {ATTEMPTS} times ({reason}). Check the network, then start again: what has arrived is kept."
    ) from reason


def steadily(read: Callable[[], bytes], window: float) -> Iterator[bytes]:
    """What `read` gives until it gives nothing. Transient if for so many seconds it came too slowly to ever end."""
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
                raise Transient(f"only {num_bytes} bytes came in {waited:.0f} seconds")
            waited, num_bytes = 0.0, 0
        yield piece

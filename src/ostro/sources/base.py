"""What the rest of Ostro knows of an object store, and how a model in one is written down. Knows no store's client.

gs://BUCKET/KEY…   s3://BUCKET/KEY…     KEY is a "directory" of a model's files, or one GGUF file
"""

import hashlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, cast

from ostro.errors import DownloadFailed, ModelNotFound

CONNECT_SECONDS = 10.0
# Without a single byte for so long, a connection counts as dead.
READ_SECONDS = 30.0
LEAST_BYTES_A_SECOND = 4096
ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 8.0
PASSING_STATUSES = frozenset((408, 429, 500, 502, 503, 504))

Scheme = Literal["gs", "s3"]
Algorithm = Literal["crc32c", "crc32", "crc64nvme", "sha256", "sha1", "md5"]
T = TypeVar("T")

_REFERENCE = re.compile(r"(?P<scheme>gs|s3)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,221})(?:/(?P<key>.*))?", re.DOTALL)
_GGUF = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf$")
_ODD = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
# Most file systems allow 255, and a temporary name may be a little longer.
_LONGEST_NAME_BYTES = 250
# Of our own: threads that wait must not disturb whoever seeded the global generator.
_jitter = random.Random()
_ENDPOINTS = {"gs": ("STORAGE_EMULATOR_HOST",), "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}


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


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a model lies in a store."""

    scheme: Scheme
    bucket: str
    key: str
    """Without a slash at either end; empty for a whole bucket."""
    endpoint: str = ""
    """Where the store is, if not at its usual address: there the same name means another model."""
    part: Literal["", "tokenizer"] = ""
    """Which of its files are meant; empty for all that a model has. In the cache it is a model of its own."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """Short, for display: the last two parts, or one where the other is only called `models`."""
        parts = [self.bucket, *_GGUF.sub("", self.key).split("/")] if self.key else [self.bucket]
        return "/".join(parts[-1:] if len(parts) < 3 or parts[-2] == "models" else parts[-2:])

    @property
    def directory(self) -> str:
        """What keys under it start with."""
        return f"{self.key}/" if self.key else ""

    @property
    def digest(self) -> str:
        text = f"{self} at {self.endpoint}" if self.endpoint else str(self)
        text += f" {self.part}" if self.part else ""
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_reference(text: str) -> bool:
    return text.startswith(("gs://", "s3://"))


def parse_reference(text: str) -> Reference:
    match = _REFERENCE.fullmatch(text)
    key = (match["key"] or "").strip("/") if match else ""
    if match is None or (key and not is_plain_path(key)):
        raise ModelNotFound(f"{text!r} is no model reference. Write gs://BUCKET/PATH or s3://BUCKET/PATH.")
    scheme = cast(Scheme, match["scheme"])
    endpoint = next((value for name in _ENDPOINTS[scheme] if (value := os.environ.get(name))), "")
    return Reference(scheme, match["bucket"], key, endpoint.rstrip("/"))


def is_plain_path(key: str) -> bool:
    """Whether a key can be a relative path on a disk, and cannot lead anywhere else."""
    return not _ODD.search(key) and all(
        part not in ("", ".", "..") and len(part.encode()) < _LONGEST_NAME_BYTES for part in key.split("/")
    )


def open_source(reference: Reference) -> Source:
    if reference.scheme == "gs":
        from ostro.sources.gcs import GcsSource

        return GcsSource(reference.bucket)
    from ostro.sources.s3 import S3Source

    return S3Source(reference.bucket)


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

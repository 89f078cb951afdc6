"""Amazon S3 and compatible stores as a Source. Wraps the client library's calls and errors; knows nothing about
models.

Honours `AWS_ENDPOINT_URL` and the other AWS variables. Without credentials, requests are anonymous.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ostro.errors import DownloadFailed, ModelNotFound, Unsupported
from ostro.sources.base import (
    CONNECT_SECONDS,
    PASSING_STATUSES,
    READ_SECONDS,
    Algorithm,
    Checksum,
    ObjectChanged,
    ObjectInfo,
    Transient,
    read_steadily,
)
from ostro.system.requirements import needs

_CHUNK_BYTES = 1 << 20
_MOST_CONNECTIONS = 16
_ETAG = re.compile(r"(?P<md5>[0-9a-f]{32})(?:-(?P<num_parts>\d{1,5}))?")
# Cheapest first; CRC64NVME is last, being by far the slowest here.
_CHECKSUMS: dict[Algorithm, str] = {
    "crc32c": "ChecksumCRC32C",
    "crc32": "ChecksumCRC32",
    "sha256": "ChecksumSHA256",
    "sha1": "ChecksumSHA1",
    "crc64nvme": "ChecksumCRC64NVME",
}
# Transfer encodings that some stores keep as metadata: the stored bytes are not compressed.
_PLAIN_ENCODINGS = ("", "identity", "aws-chunked")


class S3Source:
    """The client library's own retries are off: callers retry, under one policy for all stores."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._client = _client()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with _translated(f"s3://{self._bucket}", "bucket"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for each in page.get("Contents", ()):
                    yield ObjectInfo(each["Key"], each["Size"], each["ETag"])

    def stat(self, key: str) -> ObjectInfo:
        with _translated(f"s3://{self._bucket}/{key}", "object"):
            head = self._head(key, ChecksumMode="ENABLED")
            checksum = self._checksum(key, head)
        return ObjectInfo(key, head["ContentLength"], head["ETag"], checksum, _encoding(head))

    def read(self, key: str, generation: str, start: int, end: int) -> Iterator[bytes]:
        with _translated(f"s3://{self._bucket}/{key}", "object"):
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=generation
                )
            except self._client.exceptions.NoSuchKey as error:
                raise ObjectChanged(f"s3://{self._bucket}/{key} is gone") from error
            with answer["Body"] as body:
                yield from read_steadily(lambda: body.read1(_CHUNK_BYTES), READ_SECONDS)

    def _checksum(self, key: str, head: dict[str, Any]) -> Checksum | None:
        for algorithm, digest, num_parts in _digests(head):
            if not num_parts:
                return Checksum(algorithm, digest)
            if sizes := self._part_sizes(key, head["ContentLength"], num_parts):
                return Checksum(algorithm, digest, sizes)
        return None

    def _part_sizes(self, key: str, size: int, num_parts: int) -> tuple[int, ...] | None:
        """None if the store does not report them."""
        if num_parts == 1:
            return (size,)
        first = self._part_size(key, 1)
        if first >= size:
            return None
        last = self._part_size(key, num_parts)
        if first * (num_parts - 1) + last == size:
            return (first,) * (num_parts - 1) + (last,)
        sizes = (first, *(self._part_size(key, number) for number in range(2, num_parts)), last)
        return sizes if sum(sizes) == size else None

    def _part_size(self, key: str, number: int) -> int:
        size: int = self._head(key, PartNumber=number)["ContentLength"]
        return size

    def _head(self, key: str, **more: object) -> dict[str, Any]:
        head: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=key, **more)
        if not {"ContentLength", "ETag"} <= head.keys():
            raise Transient("the answer broke off")
        return head


def _client() -> Any:
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore import UNSIGNED  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
    except ImportError as error:
        raise Unsupported(needs("A model at s3://", "s3"), param="model") from error
    try:
        session = boto3.session.Session()
        anonymous = {} if session.get_credentials() else {"signature_version": UNSIGNED}
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            max_pool_connections=_MOST_CONNECTIONS,
            retries={"total_max_attempts": 1},
            **anonymous,
        )
        # Buckets in any region are found; the client merely requires some region.
        return session.client("s3", config=config, region_name=session.region_name or "us-east-1")
    except (BotoCoreError, ValueError, OSError) as error:
        raise DownloadFailed(
            f"The settings for S3 do not work ({error}). Check AWS_PROFILE, AWS_ENDPOINT_URL and the files in ~/.aws."
        ) from error


def _digests(head: dict[str, Any]) -> list[tuple[Algorithm, bytes, int]]:
    """The object's known digests, best first. The number counts the parts whose digests were hashed, or is 0 if the
    bytes themselves were.
    """
    etag = _ETAG.fullmatch(head["ETag"].strip('"'))
    num_parts = int(etag["num_parts"] or 0) if etag else 0
    found: list[tuple[Algorithm, bytes, int]] = []
    for algorithm, field in _CHECKSUMS.items():
        text, _, parts = str(head.get(field, "")).partition("-")
        # Stores that omit ChecksumType are ambiguous only for multipart objects.
        of_whole = head.get("ChecksumType", "COMPOSITE" if num_parts else "FULL_OBJECT") == "FULL_OBJECT"
        if text and (of_whole or parts.isdecimal()):
            found.append((algorithm, _decoded(text), int(parts or 0)))
    # With KMS or customer-provided keys, the ETag is not an MD5.
    encrypted = head.get("ServerSideEncryption", "AES256") != "AES256" or head.get("SSECustomerAlgorithm")
    if etag and not encrypted:
        found.append(("md5", bytes.fromhex(etag["md5"]), num_parts))
    return sorted(found, key=lambda each: (each[0] == "crc64nvme", each[2] > 0))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Transient("the store returned a malformed checksum") from error


def _encoding(head: dict[str, Any]) -> str | None:
    encodings = [each.strip() for each in head.get("ContentEncoding", "").split(",")]
    return ", ".join(each for each in encodings if each not in _PLAIN_ENCODINGS) or None


@contextmanager
def _translated(place: str, kind: str) -> Iterator[None]:
    """Translates the client library's errors into those of a Source."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]
    from urllib3.exceptions import HTTPError, ReadTimeoutError

    try:
        yield
    except exceptions.ClientError as error:
        raise _refusal(error, place, kind) from error
    except exceptions.NoCredentialsError as error:
        raise DownloadFailed("The credentials for S3 are not complete. Run 'aws configure'.") from error
    except (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError, ReadTimeoutError) as error:
        raise Transient("no answer in time") from error
    except ResponseParserError as error:
        raise Transient("the answer broke off") from error
    except exceptions.EndpointConnectionError as error:
        raise Transient("the connection was refused, or the address is unknown") from error
    except (exceptions.HTTPClientError, exceptions.IncompleteReadError, HTTPError, OSError) as error:
        raise Transient(f"the connection broke off: {type(error).__name__}") from error
    except exceptions.BotoCoreError as error:
        raise DownloadFailed(f"{place} cannot be read ({error}). Check the settings of AWS's tools.") from error


def _refusal(error: Any, place: str, kind: str) -> Exception:
    code = str(error.response["Error"].get("Code"))
    status = error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
    if status == 412:
        return ObjectChanged(f"{place} was overwritten")
    if status == 404:
        return ModelNotFound(f"There is no {kind} {place}. Check the name.")
    if status in PASSING_STATUSES or code in ("SlowDown", "RequestTimeout"):
        return Transient(f"status {status}")
    if status in (401, 403):
        return DownloadFailed(f"S3 refuses access to {place} ({code}). Check the credentials and the bucket's policy.")
    return DownloadFailed(f"S3 answered with status {status} for {place} ({code}).")

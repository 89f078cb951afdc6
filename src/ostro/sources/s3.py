"""Amazon S3, and stores that speak its protocol, as a Source. Knows its client's calls and errors, and nothing of
models.

`AWS_ENDPOINT_URL` and the other variables of AWS's tools hold. Without credentials it is asked anonymously.
"""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from ostro.errors import DownloadFailed, ModelNotFound, Unsupported
from ostro.sources.base import CONNECT_SECONDS, PASSING_STATUSES, READ_SECONDS, ObjectChanged, ObjectInfo, Transient

_CHUNK_BYTES = 1 << 20
_MOST_CONNECTIONS = 16
_MD5 = re.compile(r"[0-9a-f]{32}")


class S3Source:
    """Retries are the caller's, with one bound for all stores: the client's own are off."""

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
            head = self._client.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
        return ObjectInfo(key, head["ContentLength"], head["ETag"], crc32c=_crc32c(head), md5=_md5(head))

    def read(self, key: str, generation: str, start: int, end: int) -> Iterator[bytes]:
        with _translated(f"s3://{self._bucket}/{key}", "object"):
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=generation
                )
            except self._client.exceptions.NoSuchKey as error:
                raise ObjectChanged(f"s3://{self._bucket}/{key} is gone") from error
            with closing(answer["Body"]) as body:
                yield from body.iter_chunks(_CHUNK_BYTES)


def _client() -> Any:
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore import UNSIGNED  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
    except ImportError as error:
        raise Unsupported("Models at s3:// need a library. Run: pip install 'ostro[s3]'", param="model") from error
    session = boto3.session.Session()
    anonymous = {} if session.get_credentials() else {"signature_version": UNSIGNED}
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        max_pool_connections=_MOST_CONNECTIONS,
        retries={"total_max_attempts": 1},
        **anonymous,
    )
    # Buckets are found in any region; a client just has to name one.
    return session.client("s3", config=config, region_name=session.region_name or "us-east-1")


def _crc32c(head: dict[str, Any]) -> str | None:
    """The store's, if it is of the whole object: that of one with parts ends in their number."""
    value: str | None = head.get("ChecksumCRC32C")
    return value if value and head.get("ChecksumType") != "COMPOSITE" and "-" not in value else None


def _md5(head: dict[str, Any]) -> str | None:
    """The ETag is the MD5 of objects that came in one piece, unless a key of the owner's encrypts them."""
    encrypted = head.get("ServerSideEncryption", "AES256") != "AES256" or head.get("SSECustomerAlgorithm")
    etag = head["ETag"].strip('"')
    return etag if _MD5.fullmatch(etag) and not encrypted else None


@contextmanager
def _translated(place: str, kind: str) -> Iterator[None]:
    """The client's errors as a Source's."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    try:
        yield
    except exceptions.ClientError as error:
        raise _refusal(error, place, kind) from error
    except exceptions.NoCredentialsError as error:
        raise DownloadFailed("The credentials for S3 are not complete. Run 'aws configure'.") from error
    except (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError) as error:
        raise Transient("no answer in time") from error
    except exceptions.FlexibleChecksumError as error:
        raise Transient("what arrived was damaged") from error
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

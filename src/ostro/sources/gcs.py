"""Google Cloud Storage as a Source. Knows its client's calls and errors, and nothing of models.

`STORAGE_EMULATOR_HOST` holds. Without credentials it is asked anonymously, which public buckets allow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostro.errors import DownloadFailed, ModelNotFound, Unsupported
from ostro.sources.base import CONNECT_SECONDS, PASSING_STATUSES, READ_SECONDS, ObjectChanged, ObjectInfo, Transient

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client  # type: ignore[import-untyped]

# The client gives a range whole, so this much memory is used by each thread that reads.
_PIECE_BYTES = 8 << 20


class GcsSource:
    """Retries are the caller's, with one bound for all stores: the client's own are off."""

    def __init__(self, bucket: str) -> None:
        self._name = bucket
        self._bucket = _client().bucket(bucket)
        self._timeout = (CONNECT_SECONDS, READ_SECONDS)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        fields = "items(name,size,generation,crc32c,contentEncoding),nextPageToken"
        with _translated(f"gs://{self._name}", "bucket"):
            blobs = self._bucket.list_blobs(prefix=prefix, fields=fields, timeout=self._timeout, retry=None)
            for blob in blobs:
                yield _info(blob)

    def stat(self, key: str) -> ObjectInfo:
        with _translated(f"gs://{self._name}/{key}", "object"):
            blob = self._bucket.blob(key)
            blob.reload(timeout=self._timeout, retry=None)
        return _info(blob)

    def read(self, key: str, generation: str, start: int, end: int) -> Iterator[bytes]:
        blob = self._bucket.blob(key)
        for position in range(start, end, _PIECE_BYTES):
            try:
                with _translated(f"gs://{self._name}/{key}", "object"):
                    piece: bytes = blob.download_as_bytes(
                        start=position,
                        end=min(position + _PIECE_BYTES, end) - 1,
                        if_generation_match=int(generation),
                        # The bytes as they are stored: the checksum is theirs.
                        raw_download=True,
                        # There is none of a range; that of the whole is compared at the end.
                        checksum=None,
                        timeout=self._timeout,
                        retry=None,
                    )
            except ModelNotFound as error:
                raise ObjectChanged(f"gs://{self._name}/{key} is gone") from error
            yield piece


def _client() -> "Client":
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage  # type: ignore[import-untyped]
    except ImportError as error:
        raise Unsupported("Models at gs:// need a library. Run: pip install 'ostro[gcs]'", param="model") from error
    try:
        return storage.Client(project=None)
    except DefaultCredentialsError:
        return storage.Client.create_anonymous_client()


def _info(blob: "Blob") -> ObjectInfo:
    if blob.content_encoding:
        raise DownloadFailed(
            f"gs://{blob.bucket.name}/{blob.name} is stored with Content-Encoding {blob.content_encoding}. "
            "Store it as it is, without compression."
        )
    return ObjectInfo(blob.name, int(blob.size or 0), str(blob.generation), crc32c=blob.crc32c)


@contextmanager
def _translated(place: str, kind: str) -> Iterator[None]:
    """The client's errors as a Source's."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud.storage.exceptions import DataCorruption  # type: ignore[import-untyped]
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except exceptions.PreconditionFailed as error:
        raise ObjectChanged(f"{place} was overwritten") from error
    except exceptions.NotFound as error:
        raise ModelNotFound(f"There is no {kind} {place}. Check the name.") from error
    except (exceptions.Unauthorized, exceptions.Forbidden) as error:
        raise DownloadFailed(
            f"Google Cloud Storage refuses access to {place}. Run 'gcloud auth application-default login', or give the "
            "service account the role Storage Object Viewer."
        ) from error
    except exceptions.GoogleAPICallError as error:
        if error.code in PASSING_STATUSES:
            raise Transient(f"status {error.code:d}") from error
        raise DownloadFailed(f"Google Cloud Storage answered with status {error.code} for {place}.") from error
    except (RequestException, HTTPError, TransportError, DataCorruption, ConnectionError, TimeoutError) as error:
        raise Transient(_reason(error)) from error
    except GoogleAuthError as error:
        raise DownloadFailed(
            f"The credentials for Google Cloud Storage do not work ({type(error).__name__}). "
            "Run 'gcloud auth application-default login'."
        ) from error


def _reason(error: Exception) -> str:
    """Without the address, which may carry a token."""
    text = str(error)
    if "refused" in text:
        return "the connection was refused"
    if "timed out" in text:
        return "no answer in time"
    return f"the connection broke off: {type(error).__name__}"

"""Google Cloud Storage as a Source. Wraps the client library's calls and errors; knows nothing about models.

Honours `STORAGE_EMULATOR_HOST`. Without credentials, requests are anonymous, which public buckets allow.
"""

import base64
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from ostro.errors import DownloadFailed, ModelNotFound, Unsupported
from ostro.sources.base import (
    CONNECT_SECONDS,
    PASSING_STATUSES,
    READ_SECONDS,
    Checksum,
    ObjectChanged,
    ObjectInfo,
    Transient,
    read_steadily,
)
from ostro.system.requirements import needs

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client  # type: ignore[import-untyped]

_CHUNK_BYTES = 1 << 20


class GcsSource:
    """The client library's own retries are off: callers retry, under one policy for all stores."""

    def __init__(self, bucket: str) -> None:
        self._name = bucket
        self._client = _client()
        self._bucket = self._client.bucket(bucket)
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
        from google.api_core.exceptions import from_http_response

        # The client library's downloads only return when complete, so a slow transfer could not be detected.
        url = f"{self._client.api_endpoint}/download/storage/v1/b/{self._name}/o/{quote(key, safe='')}"
        try:
            with _translated(f"gs://{self._name}/{key}", "object"):
                answer = self._client._http.get(
                    url,
                    params={"alt": "media", "ifGenerationMatch": generation},
                    headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"},
                    timeout=self._timeout,
                    stream=True,
                )
                with closing(answer):
                    if not answer.ok:
                        raise from_http_response(answer)  # type: ignore[no-untyped-call]
                    yield from read_steadily(lambda: answer.raw.read1(_CHUNK_BYTES), READ_SECONDS)
        except ModelNotFound as error:
            raise ObjectChanged(f"gs://{self._name}/{key} is gone") from error


def _client() -> "Client":
    try:
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from google.cloud import storage  # type: ignore[import-untyped]
    except ImportError as error:
        raise Unsupported(needs("A model at gs://", "gcs"), param="model") from error
    try:
        return storage.Client(project=None)
    except (GoogleAuthError, ValueError, OSError) as error:
        # If credentials were configured explicitly, do not silently fall back to anonymous access.
        if isinstance(error, DefaultCredentialsError) and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            return storage.Client.create_anonymous_client()
        raise DownloadFailed(
            f"The credentials for Google Cloud Storage do not work ({type(error).__name__}). Check "
            "GOOGLE_APPLICATION_CREDENTIALS, or run 'gcloud auth application-default login'."
        ) from error


def _info(blob: "Blob") -> ObjectInfo:
    checksum = Checksum("crc32c", base64.b64decode(blob.crc32c)) if blob.crc32c else None
    return ObjectInfo(blob.name, int(blob.size or 0), str(blob.generation), checksum, blob.content_encoding or None)


@contextmanager
def _translated(place: str, kind: str) -> Iterator[None]:
    """Translates the client library's errors into those of a Source."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError, TransportError
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
    except (RequestException, HTTPError, TransportError, OSError) as error:
        raise Transient(_reason(error)) from error
    except GoogleAuthError as error:
        raise DownloadFailed(
            f"The credentials for Google Cloud Storage do not work ({type(error).__name__}). "
            "Run 'gcloud auth application-default login'."
        ) from error


def _reason(error: Exception) -> str:
    """Leaves out the URL, which may contain a token."""
    text = str(error)
    if "refused" in text:
        return "the connection was refused"
    if "timed out" in text:
        return "no answer in time"
    return f"the connection broke off: {type(error).__name__}"

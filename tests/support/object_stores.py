"""Object stores in processes of their own: the emulator of Google Cloud Storage, and moto's S3."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from urllib.parse import quote

import httpx

BUCKET = "models"
_START_SECONDS = 30.0
# No test may find the user's real credentials, or look for those of a cloud machine.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class ObjectStore:
    scheme: Literal["gs", "s3"]
    url: str
    process: subprocess.Popen[bytes]
    bucket: str = BUCKET

    def put(self, key: str, data: bytes) -> None:
        """Stores an object in the bucket, or another in its place."""
        if self.scheme == "gs":
            path = f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={quote(key, safe='')}"
            _http().post(self.url + path, content=data).raise_for_status()
        else:
            s3_client(self.url).put_object(Bucket=self.bucket, Key=key, Body=data)

    def put_model(self, prefix: str, files: Mapping[str, bytes]) -> str:
        """Stores files under a prefix; returns the model's reference."""
        for name, data in files.items():
            self.put(f"{prefix}/{name}", data)
        return f"{self.scheme}://{self.bucket}/{prefix}"

    def put_parts(self, key: str, parts: Sequence[bytes], **settings: str) -> None:
        """Stores an object that comes in parts, all but the last of at least 5 MiB each, in S3."""
        client = s3_client(self.url)
        place = {"Bucket": self.bucket, "Key": key}
        place |= {"UploadId": client.create_multipart_upload(**place, **settings)["UploadId"]}
        tags = [
            client.upload_part(**place, PartNumber=number, Body=part)["ETag"] for number, part in enumerate(parts, 1)
        ]
        done = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]}
        client.complete_multipart_upload(**place, MultipartUpload=done)

    def delete(self, key: str) -> None:
        if self.scheme == "gs":
            path = f"/storage/v1/b/{self.bucket}/o/{quote(key, safe='')}"
            _http().delete(self.url + path).raise_for_status()
        else:
            s3_client(self.url).delete_object(Bucket=self.bucket, Key=key)

    def patch(self, key: str, **fields: str) -> None:
        """Changes an object's metadata, in Google Cloud Storage."""
        path = f"/storage/v1/b/{self.bucket}/o/{quote(key, safe='')}"
        _http().patch(self.url + path, json=fields).raise_for_status()

    def environment(self, url: str) -> dict[str, str]:
        """Environment that points a client to this store at the given URL."""
        return CREDENTIALS | {"STORAGE_EMULATOR_HOST" if self.scheme == "gs" else "AWS_ENDPOINT_URL": url}


@cache
def _http() -> httpx.Client:
    # One for all: setting up TLS, which no one here speaks, takes longest.
    return httpx.Client(trust_env=False, verify=False)


@cache
def s3_client(url: str) -> Any:
    import boto3  # type: ignore[import-untyped]

    return boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )


@contextmanager
def running_store(scheme: Literal["gs", "s3"], bucket: str = BUCKET) -> Iterator[ObjectStore]:
    """A store with one empty bucket, on the loopback."""
    port = _free_port()
    if scheme == "gs":
        command = ["gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory", "-q"]
        command += ["--default-bucket", bucket]
    else:
        command = ["moto.server", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | CREDENTIALS,
    )
    try:
        store = ObjectStore(scheme, f"http://127.0.0.1:{port}", process, bucket)
        _until_up(process, port)
        if scheme == "s3":
            s3_client(store.url).create_bucket(Bucket=bucket)
        yield store
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _until_up(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the object store did not start")

"""Addresses of models in object stores. Contacts no store.

gs://BUCKET/KEY…   s3://BUCKET/KEY…     KEY is a "directory" of a model's files, or one GGUF file
"""

import hashlib
import os
import re
from dataclasses import dataclass
from typing import Literal, cast

from ostro.errors import ModelNotFound

Scheme = Literal["gs", "s3"]

_ADDRESS = re.compile(r"(?P<scheme>gs|s3)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,221})(?:/(?P<key>.*))?", re.DOTALL)
_GGUF = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf$")
_ODD = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
# Most file systems allow 255 bytes; temporary names are slightly longer than the final one.
_LONGEST_NAME_BYTES = 250
_ENDPOINTS = {"gs": ("STORAGE_EMULATOR_HOST",), "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a model in an object store."""

    scheme: Scheme
    bucket: str
    key: str
    """Without a slash at either end; empty for a whole bucket."""
    endpoint: str = ""
    """A non-default store endpoint. It is part of the identity: the same name at another endpoint is another model."""
    part: Literal["", "tokenizer"] = ""
    """Limits the address to some of the model's files; empty means all. Each part has its own cache entry."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """Short display name: the last two path parts, or only the last if the other is just `models`."""
        parts = [self.bucket, *_GGUF.sub("", self.key).split("/")] if self.key else [self.bucket]
        return "/".join(parts[-1:] if len(parts) < 3 or parts[-2] == "models" else parts[-2:])

    @property
    def directory(self) -> str:
        """The prefix shared by all keys in this directory."""
        return f"{self.key}/" if self.key else ""

    @property
    def digest(self) -> str:
        text = f"{self} at {self.endpoint}" if self.endpoint else str(self)
        text += f" {self.part}" if self.part else ""
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_address(text: str) -> bool:
    return text.startswith(("gs://", "s3://"))


def parse_address(text: str) -> StoreAddress:
    match = _ADDRESS.fullmatch(text)
    key = (match["key"] or "").strip("/") if match else ""
    if match is None or (key and not is_plain_path(key)):
        raise ModelNotFound(f"{text!r} is not a model reference. Write gs://BUCKET/PATH or s3://BUCKET/PATH.")
    scheme = cast(Scheme, match["scheme"])
    endpoint = next((value for name in _ENDPOINTS[scheme] if (value := os.environ.get(name))), "")
    return StoreAddress(scheme, match["bucket"], key, endpoint.rstrip("/"))


def is_plain_path(key: str) -> bool:
    """Whether the key is safe as a relative path on disk: it cannot escape its directory."""
    return not _ODD.search(key) and all(
        part not in ("", ".", "..") and len(part.encode()) < _LONGEST_NAME_BYTES for part in key.split("/")
    )

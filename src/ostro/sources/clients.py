"""Picks the client for an object store. Importing this module imports no client library."""

from ostro.sources.address import StoreAddress
from ostro.sources.base import Source


def open_source(address: StoreAddress) -> Source:
    if address.scheme == "gs":
        from ostro.sources.gcs import GcsSource

        return GcsSource(address.bucket)
    from ostro.sources.s3 import S3Source

    return S3Source(address.bucket)

"""Which client reads an object store. Importing this imports none of them."""

from ostro.sources.address import StoreAddress
from ostro.sources.base import Source


def open_source(address: StoreAddress) -> Source:
    if address.scheme == "gs":
        from ostro.sources.gcs import GcsSource

        return GcsSource(address.bucket)
    from ostro.sources.s3 import S3Source

    return S3Source(address.bucket)

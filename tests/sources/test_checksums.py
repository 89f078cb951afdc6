"""Objects of S3 have many kinds of checksums, or none: whatever there is, a damaged byte never gets into the cache."""

import base64
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from bucket_models import CONFIG, contents, models_in
from fault_proxy import Fault, FaultProxy
from object_stores import BUCKET, ObjectStore, s3_client

from ostro.errors import DownloadFailed
from ostro.sources.address import parse_address
from ostro.sources.base import Checksum
from ostro.sources.clients import open_source
from ostro.sources.crc64 import Crc64
from ostro.sources.fetch import fetch_model
from ostro.sources.store import ModelStore

pytest_plugins = ["store_fixtures"]
pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.parametrize("store", ["s3_store"], indirect=True)]

PART = random.Random(1).randbytes(5 << 20)
DATA = random.Random(2).randbytes(3000)
FILE = "model.safetensors"


def crc64nvme(data: bytes) -> bytes:
    crc = Crc64()
    crc.update(data)
    return crc.digest()


def crc32(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def put_bare(store: ObjectStore, key: str, data: bytes) -> None:
    """An object of which the store knows nothing: encrypted with a key of the owner's, so that its ETag is no MD5."""
    client = s3_client(store.url)
    client.put_object(Bucket=BUCKET, Key=key, Body=data, ServerSideEncryption="aws:kms")


def undescribe(proxy: FaultProxy, path: str) -> None:
    for header in ("x-amz-checksum-crc32", "x-amz-checksum-type"):
        proxy.describe(path, header, None)


def checksum_of(key: str) -> Checksum | None:
    return open_source(parse_address(f"s3://{BUCKET}")).stat(key).checksum


# --- what a store tells ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [pytest.param([PART, b"the end"], marks=pytest.mark.full), [PART, PART + b"uneven", b"the end"]],
    ids=["even", "uneven"],
)
def test_a_flipped_byte_of_an_object_in_parts_is_noticed(
    store: ObjectStore, proxy: FaultProxy, prefix: str, parts: list[bytes]
) -> None:
    """It had only an ETag over the parts, was held to its size, and the damage became the manifest's truth."""
    store.put_parts(f"{prefix}/{FILE}", parts)
    reference = store.put_model(prefix, {"config.json": CONFIG})
    proxy.fail(Fault.FLIPPED, path=FILE)
    assert contents(fetch_model(reference, progress=False))[FILE] == b"".join(parts)
    assert proxy.faults_left == 0
    checksum = checksum_of(f"{prefix}/{FILE}")
    assert checksum is not None
    assert (checksum.algorithm, checksum.part_sizes) == ("md5", tuple(map(len, parts)))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("crc32c", base64.b64encode(b"abcd").decode(), Checksum("crc32c", b"abcd")),
        ("crc32", base64.b64encode(b"abcd").decode(), Checksum("crc32", b"abcd")),
        ("sha256", base64.b64encode(b"a" * 32).decode(), Checksum("sha256", b"a" * 32)),
        ("crc64nvme", base64.b64encode(b"abcdefgh").decode(), Checksum("crc64nvme", b"abcdefgh")),
        ("crc32", base64.b64encode(b"abcd").decode() + "-2", Checksum("crc32", b"abcd", (len(PART), 7))),
    ],
    ids=["crc32c", "crc32", "sha256", "crc64nvme", "of-parts"],
)
def test_stored_checksums_of_the_whole_or_of_parts_are_used(
    store: ObjectStore, proxy: FaultProxy, prefix: str, header: str, value: str, expected: Checksum
) -> None:
    store.put_parts(f"{prefix}/{FILE}", [PART, b"the end"])
    undescribe(proxy, FILE)
    # So that the ETag tells nothing.
    proxy.describe(FILE, "x-amz-server-side-encryption", "aws:kms")
    proxy.describe(FILE, f"x-amz-checksum-{header}", value)
    proxy.describe(FILE, "x-amz-checksum-type", "COMPOSITE" if "-" in value else "FULL_OBJECT")
    assert checksum_of(f"{prefix}/{FILE}") == expected


def test_a_possible_checksum_of_parts_is_not_taken_for_the_whole_files(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    store.put_parts(f"{prefix}/{FILE}", [PART, b"the end"], ChecksumAlgorithm="CRC32")
    checksum = checksum_of(f"{prefix}/{FILE}")
    assert checksum is not None
    assert checksum.algorithm == "md5"


@pytest.mark.full
@pytest.mark.parametrize("make", [crc64nvme, crc32], ids=["crc64nvme", "crc32"])
def test_an_encrypted_object_is_held_to_its_checksum(
    store: ObjectStore, proxy: FaultProxy, prefix: str, make: Callable[[bytes], bytes]
) -> None:
    put_bare(store, f"{prefix}/{FILE}", DATA)
    reference = store.put_model(prefix, {"config.json": CONFIG})
    undescribe(proxy, FILE)
    name = "crc64nvme" if make is crc64nvme else "crc32"
    proxy.describe(FILE, f"x-amz-checksum-{name}", base64.b64encode(make(DATA)).decode())
    proxy.fail(Fault.FLIPPED, path=FILE)
    assert contents(fetch_model(reference, progress=False))[FILE] == DATA
    assert proxy.faults_left == 0


def test_an_object_that_nothing_can_verify_is_refused(
    store: ObjectStore, proxy: FaultProxy, prefix: str, cache: Path
) -> None:
    put_bare(store, f"{prefix}/{FILE}", DATA)
    reference = store.put_model(prefix, {"config.json": CONFIG})
    undescribe(proxy, FILE)
    with pytest.raises(DownloadFailed, match=r"no checksum of s3://.*model\.safetensors.* --checksum-algorithm CRC32"):
        fetch_model(reference, progress=False)
    assert (models_in(cache), proxy.reads) == ([], [])


# --- rot ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_rotten_file_of_an_object_in_parts_does_not_get_into_the_next_version(
    store: ObjectStore, proxy: FaultProxy, prefix: str
) -> None:
    """It did, and `verify` then called the damage good."""
    store.put_parts(f"{prefix}/{FILE}", [PART, b"the end"])
    reference = store.put_model(prefix, {"config.json": CONFIG})
    path = fetch_model(reference, progress=False) / FILE
    path.write_bytes(bytes(path.stat().st_size))
    store.put(f"{prefix}/config.json", CONFIG + b" ")
    assert contents(fetch_model(reference, progress=False, refresh=True))[FILE] == PART + b"the end"
    [entry] = ModelStore().entries()
    assert ModelStore().verify(entry) == []

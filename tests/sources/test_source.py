"""What both stores do alike, below everything else."""

import hashlib
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from object_stores import BUCKET, ObjectStore

from ostro.errors import ModelNotFound
from ostro.sources import gcs, s3
from ostro.sources.base import ObjectChanged, Source, open_source, parse_reference

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

DATA = bytes(range(256)) * 10


@pytest.fixture
def source(store: ObjectStore, proxy: FaultProxy) -> Source:
    return open_source(parse_reference(f"{store.scheme}://{BUCKET}"))


def test_an_object_is_listed_described_and_read_in_ranges(store: ObjectStore, source: Source) -> None:
    store.put("source/a.bin", DATA)
    store.put("source-two/b.bin", DATA)
    [listed] = source.list("source/")
    info = source.stat("source/a.bin")
    assert (listed.key, listed.size, listed.generation) == ("source/a.bin", len(DATA), info.generation)
    assert info.crc32c or info.md5 == hashlib.md5(DATA).hexdigest()
    for start, end in [(0, len(DATA)), (0, 1), (100, 1000), (len(DATA) - 1, len(DATA))]:
        assert b"".join(source.read(info.key, info.generation, start, end)) == DATA[start:end]


def test_a_range_longer_than_one_request_is_read_in_several(
    gcs_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_store.url)
    monkeypatch.setattr(gcs, "_PIECE_BYTES", 1000)
    gcs_store.put("source/long.bin", DATA)
    source = gcs.GcsSource(BUCKET)
    pieces = list(source.read("source/long.bin", source.stat("source/long.bin").generation, 10, len(DATA)))
    assert (len(pieces), b"".join(pieces)) == (3, DATA[10:])


def test_an_object_that_was_overwritten_or_deleted_is_not_read(store: ObjectStore, source: Source) -> None:
    store.put("source/changing.bin", DATA)
    generation = source.stat("source/changing.bin").generation
    store.put("source/changing.bin", DATA[::-1])
    with pytest.raises(ObjectChanged, match="was overwritten"):
        list(source.read("source/changing.bin", generation, 0, 10))
    generation = source.stat("source/changing.bin").generation
    store.delete("source/changing.bin")
    with pytest.raises(ObjectChanged, match="is gone"):
        list(source.read("source/changing.bin", generation, 0, 10))
    with pytest.raises(ModelNotFound, match="There is no object"):
        source.stat("source/changing.bin")


def test_without_credentials_stores_are_asked_anonymously(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore import UNSIGNED  # type: ignore[import-untyped]
    from google.auth.credentials import AnonymousCredentials

    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert isinstance(gcs._client()._credentials, AnonymousCredentials)
    assert s3._client().meta.config.signature_version is UNSIGNED

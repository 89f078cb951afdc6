"""Behaviour that both stores share, at the lowest level."""

import pytest
from fault_proxy import FaultProxy
from object_stores import BUCKET, ObjectStore

from ostro.errors import ModelNotFound
from ostro.sources.address import parse_address
from ostro.sources.base import ObjectChanged, Source
from ostro.sources.clients import open_source

pytest_plugins = ["store_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

DATA = bytes(range(256)) * 10


@pytest.fixture
def source(store: ObjectStore, proxy: FaultProxy) -> Source:
    return open_source(parse_address(f"{store.scheme}://{BUCKET}"))


def test_an_object_is_listed_described_and_read_in_ranges(store: ObjectStore, source: Source) -> None:
    store.put("source/a.bin", DATA)
    store.put("source-two/b.bin", DATA)
    [listed] = source.list("source/")
    info = source.stat("source/a.bin")
    assert (listed.key, listed.size, listed.generation) == ("source/a.bin", len(DATA), info.generation)
    assert info.checksum is not None
    assert info.encoding is None
    for start, end in [(0, len(DATA)), (0, 1), (100, 1000), (len(DATA) - 1, len(DATA))]:
        assert b"".join(source.read(info.key, info.generation, start, end)) == DATA[start:end]


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

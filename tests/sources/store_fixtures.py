"""Two stores, each behind a proxy that can break things; a cache of its own for every test; no long waits.

A plugin of the tests that name it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from object_stores import ObjectStore, running_store

from ostro.sources import base, gcs, partial, s3

_numbers = iter(range(10**6))


@pytest.fixture(scope="session")
def gcs_store() -> Iterator[ObjectStore]:
    with running_store("gs") as store:
        yield store


@pytest.fixture(scope="session")
def s3_store() -> Iterator[ObjectStore]:
    with running_store("s3") as store:
        yield store


@pytest.fixture(params=["gcs_store", "s3_store"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OSTRO_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(base, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(partial, "BLOCK_BYTES", 1 << 16)
    for module in (gcs, s3):
        monkeypatch.setattr(module, "READ_SECONDS", 1.0)
    return tmp_path / "cache"


@pytest.fixture
def prefix() -> str:
    """No two tests share objects."""
    return f"models/tiny-{next(_numbers)}"


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    proxy = FaultProxy(store.url)
    for name, value in store.environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()

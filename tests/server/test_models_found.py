"""What endpoints make of models that turn up under a root, and go from there."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from live_service import set_faults, until
from model_directory import write_model

from ostro.config import EngineConfig
from ostro.errors import BadRequest, ModelNotFound
from ostro.pool.catalog import Catalog, ModelSpec
from ostro.pool.pool import ModelPool, PoolLimits, PoolState
from ostro.server.admission.limits import Gate, GateLimits
from ostro.server.api import HttpOptions
from ostro.server.app import build_app
from ostro.server.models.served import ANY, Models
from ostro.server.models.service import ModelService


def models_under_a_root(paths: Sequence[str], *, refresh_seconds: float = 30.0) -> Models:
    """Not looked at yet."""
    catalog = Catalog(
        [],
        roots=["root"],
        make=lambda spec: spec,
        list_models=lambda root: [ModelSpec(name=Path(path).name, config=EngineConfig(model=path)) for path in paths],
        refresh_seconds=refresh_seconds,
    )
    return Models(ModelPool(catalog, lambda spec, files: ModelService(spec.config), PoolLimits()))


def test_the_only_model_of_a_root_answers_to_no_name_from_the_start() -> None:
    """Before the first look it was said that there were several."""
    assert asyncio.run(models_under_a_root(["a"]).find(ANY)) == "a"
    with pytest.raises(BadRequest, match="several models"):
        asyncio.run(models_under_a_root(["a", "b"]).find(ANY))
    with pytest.raises(ModelNotFound, match="No models are known here"):
        asyncio.run(models_under_a_root([]).view(ANY))


def test_a_server_without_a_model_is_ready_when_there_is_one() -> None:
    found: list[str] = []

    async def scenario() -> None:
        models = models_under_a_root(found, refresh_seconds=0.0)
        await models.start()
        try:
            await models.pool.catalog.refresh()
            states = [models.state]
            found.append("late")
            await until(lambda: models.state is PoolState.READY)
            assert states == [PoolState.LOADING]
        finally:
            await models.stop()

    asyncio.run(scenario())


@pytest.mark.full
def test_a_loaded_model_that_left_its_place_is_listed_and_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed, but a 404 by itself, and so in the answer of whoever unloaded it."""
    set_faults(monkeypatch)
    held = [str(write_model(tmp_path / "leaves"))]

    async def scenario() -> None:
        models = models_under_a_root(held)
        app = build_app(models, gate=Gate(GateLimits()), options=HttpOptions())
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                assert (await client.post("/admin/load/leaves")).json()["state"] == "ready"
                held.clear()
                await models.pool.catalog.refresh()
                [card] = (await client.get("/v1/models")).json()["data"]
                assert (await client.get("/v1/models/leaves")).json() == card
                assert (await client.post("/admin/load/leaves")).json()["state"] == "ready"
                told = await client.post("/admin/unload/leaves")
                assert (told.status_code, told.json()["state"]) == (200, "available")
                assert (await client.get("/v1/models/leaves")).status_code == 404
                assert (await client.post("/admin/unload/leaves")).status_code == 404
        finally:
            await models.pool.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))

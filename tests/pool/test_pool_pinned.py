"""Pinned models that could not be loaded at first come all the same, without anybody asking for them."""

import asyncio

import pytest
from jumping_loop import in_jumping_time
from pool_world import FakeService, Model, Pool, World, a_spec, now

from ostro.errors import DownloadFailed, ModelError, ModelNotFound
from ostro.pool.catalog import Catalog, ModelSpec
from ostro.pool.pool import ModelPool, PoolLimits, PoolState


@in_jumping_time
async def test_pinned_model_that_failed_is_tried_again_ever_later() -> None:
    model = Model(load=1.0, error=ModelError("Its bucket is down."))
    pool = Pool({"a": model}, pinned=["a"], retry_seconds=30.0)
    await pool.start()
    began = now()
    await asyncio.sleep(100)
    # At once, after 30 s, and after 60 s more.
    assert [service.spec.name for service in pool.made] == ["a"] * 3
    model.error = None
    while pool.state("a") is not PoolState.READY:
        await asyncio.sleep(1)
    assert now() - began == pytest.approx(30 + 60 + 120, abs=10)
    await pool.end()


@in_jumping_time
async def test_pinned_model_whose_engine_gave_up_comes_back() -> None:
    pool = Pool({"a": Model()}, pinned=["a"], retry_seconds=30.0)
    await pool.start()
    await pool.load("a")
    pool.service("a").die(ModelError("It gave up."))
    await asyncio.sleep(60)
    assert pool.ready() == {"a"}
    await pool.end()


@in_jumping_time
async def test_pinned_model_that_was_unloaded_stays_so() -> None:
    pool = Pool({"a": Model()}, pinned=["a"])
    await pool.start()
    await pool.load("a")
    await pool.unload("a")
    await asyncio.sleep(1000)
    assert pool.state("a") is PoolState.AVAILABLE
    await pool.end()


def test_pinned_model_of_a_root_that_could_not_be_listed_comes_when_it_can() -> None:
    listings: list[DownloadFailed | list[ModelSpec]] = [
        DownloadFailed("The bucket does not answer."),
        DownloadFailed("Still not."),
        [a_spec("a", pinned=True)],
    ]

    def list_models(root: str) -> list[ModelSpec]:
        outcome = listings.pop(0) if len(listings) > 1 else listings[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def scenario() -> None:
        world = World({"a": Model(load=0.01)}, PoolLimits(retry_seconds=0.05))
        catalog = Catalog([], roots=["root"], make=lambda spec: spec, list_models=list_models)
        pool = ModelPool(catalog, lambda spec, files: FakeService(world, spec), world.limits)
        await pool.start()
        while not pool.counters.loads:
            await asyncio.sleep(0.01)
        assert [view.name for view in pool.touched()] == ["a"]
        await pool.stop()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@in_jumping_time
async def test_model_that_nobody_touched_costs_no_entry() -> None:
    """A server of thousands of models looked at all of them four times a second."""
    pool = Pool({name: Model() for name in "abc"})
    assert [view.state for view in pool.views()] == [PoolState.AVAILABLE] * 3
    assert (await pool.spec("a")).name == "a"
    assert pool.touched() == []
    await pool.load("b")
    assert [view.name for view in pool.touched()] == ["b"]
    await pool.end()


def test_loaded_model_that_left_its_place_is_still_known() -> None:
    """It was listed, could be unloaded, and was a 404 in the answer to that."""
    held = ["a"]

    async def scenario() -> None:
        world = World({"a": Model(load=0.01, stop=0.0)}, PoolLimits())
        catalog = Catalog(
            [],
            roots=["root"],
            make=lambda spec: spec,
            list_models=lambda root: [a_spec(name) for name in held],
        )
        pool = ModelPool(catalog, lambda spec, files: FakeService(world, spec), world.limits)
        await pool.load("a")
        held.clear()
        await catalog.refresh()
        spec = await pool.spec("a")
        assert [view.name for view in pool.views()] == ["a"]
        assert pool.view_of(spec).state is PoolState.READY
        await pool.unload("a")
        assert pool.view_of(spec).state is PoolState.AVAILABLE
        assert pool.views() == []
        with pytest.raises(ModelNotFound):
            await pool.spec("a")
        await pool.stop()

    asyncio.run(asyncio.wait_for(scenario(), 20))

"""Files come before room: what a model whose files are on their way may and may not do to the others."""

import asyncio
from pathlib import Path

import pytest
from jumping_loop import in_jumping_time
from pool_world import MIB, FakeService, Model, Pool, World, a_catalog, a_spec, now, outcome, took, until

from ostro.errors import DownloadFailed, ModelError, Unavailable
from ostro.pool.catalog import ModelSpec
from ostro.pool.pool import Files, Footprint, ModelPool, PoolLimits, PoolState

MINUTES = 60.0


@in_jumping_time
async def test_fetch_takes_no_place_and_evicts_nobody() -> None:
    """A download was part of the load: it held the model's place, and all others had a 503 until it was over."""
    pool = Pool({"a": Model(), "b": Model(fetch=20 * MINUTES)}, models=1)
    await pool.work("a")
    await asyncio.sleep(2)
    asked = pool.request("b")
    await asyncio.sleep(1)
    asked.cancel()
    for _ in range(20):
        assert await took(pool.work("a", 1.0)) == pytest.approx(1.0)
        await asyncio.sleep(10)
    assert (pool.state("a"), pool.state("b")) == (PoolState.READY, PoolState.FETCHING)
    assert (pool.world.history, pool.counters.evictions) == (["+a"], 0)
    await pool.end()


@in_jumping_time
async def test_others_make_room_once_the_files_are_here() -> None:
    pool = Pool({"a": Model(), "b": Model(fetch=10.0)}, models=1)
    await pool.work("a")
    asked = pool.request("b")
    await asyncio.sleep(9)
    assert (pool.ready(), pool.state("b")) == ({"a"}, PoolState.FETCHING)
    assert await asked == "b"
    assert pool.world.history == ["+a", "-a", "+b"]
    # Loading and fetching are told apart: only a load keeps others from their room.
    assert pool.view("b").load_seconds == pytest.approx(2.0)
    await pool.end()


@in_jumping_time
async def test_what_a_fetched_model_will_take_is_known_before_it_is_loaded() -> None:
    """A model that was not on the disk counted as nothing until it was loaded. The world holds the limits all along."""
    pool = Pool({"a": Model(mib=900), "b": Model(mib=900, fetch=5.0)}, memory=1000 * MIB)
    first = pool.request("a", 30.0)
    await asyncio.sleep(1)
    assert await pool.work("b") == "b"
    assert await first == "a"
    assert pool.world.history == ["+a", "-a", "+b"]
    await pool.end()


@in_jumping_time
async def test_fetch_goes_on_when_nobody_waits_any_more() -> None:
    pool = Pool({"a": Model(fetch=10 * MINUTES)}, wait_seconds=60.0)
    refused = await outcome(pool.work("a"))
    assert isinstance(refused, Unavailable)
    assert "still being fetched after a wait of 60 s" in str(refused)
    assert refused.retry_after == 60
    await asyncio.sleep(9 * MINUTES + 1)
    assert (pool.state("a"), pool.files.fetched) == (PoolState.AVAILABLE, ["a"])
    # Nobody keeps what nobody uses from leaving the disk.
    assert pool.files.held == []
    assert await took(pool.load("a")) < 3.0
    assert pool.files.fetched == ["a"]
    await pool.end()


@in_jumping_time
async def test_one_fetch_serves_all_who_ask() -> None:
    pool = Pool({"a": Model(fetch=30.0)})
    assert await asyncio.gather(*(pool.work("a") for _ in range(20))) == ["a"] * 20
    assert (pool.files.fetched, pool.counters.loads) == (["a"], 1)
    await pool.end()


@in_jumping_time
async def test_fetch_that_nobody_waits_for_gives_way_and_loses_nothing() -> None:
    pool = Pool({name: Model(fetch=100.0) for name in "abc"}, fetches=2, wait_seconds=1000.0)
    for name in "ab":
        asked = pool.request(name)
        await asyncio.sleep(1)
        asked.cancel()
    began = now()
    assert pool.files.fetching == ["a", "b"]
    c = asyncio.create_task(took(pool.work("c")))
    await until(lambda: "c" in pool.files.fetching)
    assert pool.files.fetching == ["b", "c"]
    await until(lambda: "b" in pool.files.fetched)
    assert pool.state("a") is PoolState.AVAILABLE
    # a was on its way for two seconds.
    assert await outcome(pool.work("a")) == "a"
    assert now() - began == pytest.approx(99.0 + 98.0 + 3.0, abs=1.0)
    assert await c == pytest.approx(103.0, abs=1.0)
    await pool.end()


@in_jumping_time
async def test_fetches_that_are_waited_for_come_in_turn() -> None:
    pool = Pool({name: Model(fetch=10.0) for name in "abcd"}, fetches=1, wait_seconds=100.0)
    asked = [pool.request(name) for name in "abcd"]
    await asyncio.sleep(1)
    assert [pool.state(name) for name in "abcd"] == [PoolState.FETCHING] * 4
    assert await asyncio.gather(*asked) == list("abcd")
    assert pool.files.fetched == list("abcd")
    await pool.end()


@in_jumping_time
async def test_local_model_waits_for_no_fetch() -> None:
    pool = Pool({"a": Model(fetch=100.0), "b": Model()}, fetches=1)
    asked = pool.request("a")
    await asyncio.sleep(1)
    assert await took(pool.load("b")) == pytest.approx(2.0, abs=0.2)
    asked.cancel()
    await pool.end()


@in_jumping_time
async def test_failed_fetch_is_reported_and_not_retried_at_once() -> None:
    model = Model(fetch=5.0, fetch_error=DownloadFailed("The bucket does not answer."))
    pool = Pool({"a": model, "b": Model()}, retry_seconds=30.0, models=1)
    await pool.load("b")
    failures = await asyncio.gather(*(outcome(pool.work("a")) for _ in range(3)))
    assert [str(failure) for failure in failures] == ["The bucket does not answer."] * 3
    assert (pool.state("a"), pool.view("a").failure) == (PoolState.FAILED, "The bucket does not answer.")
    assert await took(outcome(pool.work("a"))) == 0.0
    assert pool.ready() == {"b"}
    await asyncio.sleep(31)
    model.fetch_error = None
    assert await pool.work("a") == "a"
    await pool.end()


@in_jumping_time
async def test_unload_ends_a_fetch() -> None:
    pool = Pool({"a": Model(fetch=100.0)}, wait_seconds=1000.0)
    asked = pool.request("a")
    await asyncio.sleep(10)
    assert await pool.unload("a")
    refused = await outcome(asked)
    assert isinstance(refused, Unavailable)
    assert "unloaded while it was downloading" in str(refused)
    assert (pool.files.fetching, pool.state("a")) == ([], PoolState.AVAILABLE)
    assert await took(pool.work("a", 0.0)) == pytest.approx(92.0, abs=1.0)
    await pool.end()


@in_jumping_time
async def test_files_are_held_from_the_fetch_until_the_service_has_ended() -> None:
    pool = Pool({"a": Model(fetch=5.0, stop=10.0)})
    await pool.load("a")
    assert pool.files.held == ["a"]
    pool.service("a").die()
    assert await pool.work("a") == "a"
    unloading = asyncio.create_task(pool.unload("a"))
    await asyncio.sleep(5)
    assert pool.files.held == ["a"]
    await unloading
    await asyncio.sleep(1)
    assert pool.files.held == []
    await pool.end()


@in_jumping_time
async def test_files_are_held_while_a_model_waits_for_room_and_no_longer() -> None:
    pool = Pool({"a": Model(), "b": Model(fetch=1.0)}, models=1, wait_seconds=5.0, patience=10.0)
    first = pool.request("a", 60.0)
    await asyncio.sleep(3)
    waits = pool.request("b")
    await asyncio.sleep(2)
    assert sorted(pool.files.held) == ["a", "b"]
    waits.cancel()
    await asyncio.sleep(1)
    assert pool.files.held == ["a"]
    first.cancel()
    await outcome(first)
    await pool.end()


@in_jumping_time
async def test_stop_ends_fetches() -> None:
    pool = Pool({"a": Model(fetch=100.0)}, pinned=["a"])
    await pool.start()
    asked = pool.request("a")
    await asyncio.sleep(1)
    await pool.end_early()
    assert isinstance(await outcome(asked), Unavailable)


@in_jumping_time
async def test_model_that_can_never_fit_is_refused_before_others_go() -> None:
    world = World({"a": Model(), "b": Model()}, PoolLimits(models=1, memory=1000 * MIB))

    async def expected(spec: ModelSpec, files: Files | None) -> Footprint | ModelError:
        return Footprint(bytes=MIB) if spec.name == "a" else ModelError("It leaves no room for keys and values.")

    catalog = a_catalog(a_spec("a"), a_spec("b"))
    pool = ModelPool(catalog, lambda spec, files: FakeService(world, spec), world.limits, expected=expected, clock=now)
    await pool.load("a")
    with pytest.raises(ModelError, match="no room for keys and values"):
        await pool.load("b")
    assert world.history == ["+a"]
    await pool.stop()


@in_jumping_time
async def test_other_errors_of_an_estimate_are_left_to_the_load() -> None:
    world = World({"a": Model()}, PoolLimits(memory=1000 * MIB))

    async def expected(spec: ModelSpec, files: Files | None) -> Footprint:
        raise ModelError("It has no header.")

    pool = ModelPool(
        a_catalog(a_spec("a")), lambda spec, files: FakeService(world, spec), world.limits, expected=expected, clock=now
    )
    await pool.load("a")
    await pool.stop()


@in_jumping_time
async def test_unforeseen_error_of_model_files_fails_the_model_only() -> None:
    class Broken:
        async def find(self, spec: ModelSpec) -> Files | None:
            raise PermissionError(13, "No", str(Path("/cache")))

        async def fetch(self, spec: ModelSpec) -> Files:
            raise AssertionError("nothing is fetched")

    world = World({"a": Model()}, PoolLimits())
    pool = ModelPool(
        a_catalog(a_spec("a")),
        lambda spec, files: FakeService(world, spec),
        world.limits,
        model_files=Broken(),
        clock=now,
    )
    with pytest.raises(ModelError, match="PermissionError"):
        await pool.load("a")
    await pool.stop()

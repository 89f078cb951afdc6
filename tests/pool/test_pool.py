"""One behaviour of the pool at a time, in a world where time jumps."""

import asyncio
import traceback
from itertools import pairwise

import pytest
from jumping_loop import in_jumping_time
from pool_world import MIB, FakeService, Model, Pool, a_catalog, a_spec, now, outcome, took, until

from ostro.engine_process.handle import State
from ostro.errors import BadRequest, ModelError, ModelNotFound, Unavailable, Unsupported
from ostro.pool.catalog import ModelSpec
from ostro.pool.pool import Files, ModelPool, PoolLimits, PoolState


def models(names: str, **how: int | float) -> dict[str, Model]:
    return {name: Model(**how) for name in names}  # type: ignore[arg-type]


@in_jumping_time
async def test_one_load_serves_all_who_ask() -> None:
    pool = Pool(models("a"))
    assert await asyncio.gather(*(pool.work("a") for _ in range(50))) == ["a"] * 50
    assert (pool.counters.loads, pool.world.history) == (1, ["+a"])
    assert pool.view("a").load_seconds == pytest.approx(2.0)
    await pool.end()


@in_jumping_time
async def test_loaded_model_is_used_at_once_and_counts_as_in_use_until_left() -> None:
    pool = Pool(models("a"))
    await pool.load("a")
    async with pool.use("a") as (spec, service):
        assert (spec.name, service.state, pool.view("a").in_use) == ("a", State.READY, 1)
        await asyncio.sleep(5)
    await asyncio.sleep(3)
    assert pool.view("a").in_use == 0
    assert pool.view("a").last_used == pytest.approx(3.0)
    await pool.end()


@in_jumping_time
async def test_lease_may_be_given_back_by_another_task() -> None:
    pool = Pool(models("a"))
    lease = pool.use("a")
    await asyncio.create_task(lease.__aenter__())
    assert pool.view("a").in_use == 1
    await asyncio.create_task(lease.__aexit__(None, None, None))
    assert pool.view("a").in_use == 0
    await pool.end()


@in_jumping_time
async def test_error_within_the_block_gives_the_lease_back() -> None:
    pool = Pool(models("a"))
    with pytest.raises(BadRequest, match="mine"):
        async with pool.use("a"):
            raise BadRequest("mine")
    assert pool.view("a").in_use == 0
    await pool.end()


@in_jumping_time
async def test_client_that_goes_away_does_not_end_the_load() -> None:
    pool = Pool(models("a"))
    first, second = pool.request("a"), pool.request("a")
    await asyncio.sleep(1)
    first.cancel()
    assert await second == "a"
    only = pool.request("a")
    await pool.unload("a")
    assert await outcome(only) == "a"
    last = pool.request("a")
    await asyncio.sleep(0)
    last.cancel()
    await asyncio.sleep(10)
    assert pool.ready() == {"a"}
    await pool.end()


@pytest.mark.parametrize("moment", [0.0, 1.0, 2.0, 2.0000001, 2.5, 3.0])
def test_cancelled_request_leaks_no_lease(moment: float) -> None:
    @in_jumping_time
    async def run() -> None:
        pool = Pool(models("a"))
        request = pool.request("a", 1.0)
        asyncio.get_running_loop().call_later(moment, request.cancel)
        await outcome(request)
        assert (pool.view("a").in_use, pool.view("a").waiting) == (0, 0)
        assert await pool.unload("a")
        await pool.end()

    run()


@in_jumping_time
async def test_cancellation_at_the_moment_of_the_grant_returns_the_lease() -> None:
    pool = Pool(models("a"))
    request = pool.request("a")
    await until(lambda: bool(pool.made))
    loading = next(task for task in asyncio.all_tasks() if task.get_name() == "load a")
    loading.add_done_callback(lambda task: request.cancel())
    assert isinstance(await outcome(request), asyncio.CancelledError)
    assert (pool.state("a"), pool.view("a").in_use) == (PoolState.READY, 0)
    await pool.end()


@in_jumping_time
async def test_least_recently_used_model_goes_first() -> None:
    pool = Pool(models("abcde"), models=3)
    for name in "abcabdaeb":
        await pool.work(name)
    # d pushes out c, the oldest; e pushes out b, for a was used again; b pushes out d.
    assert list(pool.counters.evicted) == ["c", "b", "d"]
    assert pool.ready() == {"a", "e", "b"}
    assert [pool.view(name).evictions for name in "abcde"] == [0, 1, 1, 1, 0]
    await pool.end()


@in_jumping_time
async def test_evicted_service_has_ended_before_the_next_one_starts() -> None:
    pool = Pool({"a": Model(stop=30.0), "b": Model()}, models=1)
    await pool.load("a")
    await pool.load("b")
    assert pool.world.history == ["+a", "-a", "+b"]
    await pool.end()


@pytest.mark.parametrize("kind", ["mib", "device_mib"])
def test_room_is_made_by_bytes_before_a_load(kind: str) -> None:
    @in_jumping_time
    async def run() -> None:
        sizes = {"a": 300, "b": 300, "c": 300, "d": 700}
        limit = {"mib": "memory", "device_mib": "device_memory"}[kind]
        pool = Pool({name: Model(**{kind: size}) for name, size in sizes.items()}, **{limit: 1000 * MIB})  # type: ignore[arg-type]
        for name in "abcd":
            await pool.work(name)
        assert list(pool.counters.evicted) == ["a", "b"]
        assert pool.ready() == {"c", "d"}
        await pool.end()

    run()


@in_jumping_time
async def test_measured_figure_counts_from_then_on() -> None:
    """Expected: nothing, for nobody knows. Then the model turns out large, and idle ones go for it."""
    pool = Pool({"a": Model(mib=600), "b": Model(mib=600, expected=False)}, memory=1000 * MIB, exact=False)
    await pool.work("a")
    await pool.load("b")
    assert (pool.ready(), pool.world.history) == ({"b"}, ["+a", "+b", "-a"])
    await pool.work("a")
    await pool.work("b")
    assert pool.world.history[3:] == ["-b", "+a", "-a", "+b"]
    await pool.end()


@in_jumping_time
async def test_model_that_does_not_fit_beside_busy_ones_after_all_waits_in_line() -> None:
    pool = Pool({"a": Model(mib=600), "b": Model(mib=600, expected=False)}, memory=1000 * MIB, exact=False)
    busy = pool.request("a", 30.0)
    await until(lambda: pool.view("a").in_use == 1)
    assert await pool.work("b") == "b"
    assert busy.done()
    assert pool.world.history == ["+a", "+b", "-b", "-a", "+b"]
    await pool.end()


@in_jumping_time
async def test_models_of_unknown_size_load_one_at_a_time() -> None:
    pool = Pool({name: Model(expected=False) for name in "ab"}, memory=1000 * MIB)
    assert await took(asyncio.gather(pool.load("a"), pool.load("b"))) == pytest.approx(4.1, abs=0.1)
    await pool.end()


@in_jumping_time
async def test_models_that_fit_load_side_by_side() -> None:
    pool = Pool(models("ab"), memory=1000 * MIB)
    assert await took(asyncio.gather(pool.load("a"), pool.load("b"))) == pytest.approx(2.1, abs=0.1)
    await pool.end()


@pytest.mark.parametrize("expected", [True, False])
def test_model_larger_than_the_budget_is_refused_with_both_figures(expected: bool) -> None:
    @in_jumping_time
    async def run() -> None:
        pool = Pool({"a": Model(mib=2048, expected=expected)}, memory=1024 * MIB, exact=False)
        with pytest.raises(ModelError, match=r"a needs 2\.00 GiB of host memory, where 1\.00 GiB are allowed"):
            await pool.work("a")
        await asyncio.sleep(1)
        assert pool.world.history == ([] if expected else ["+a", "-a"])
        await asyncio.sleep(100)
        # Now it is known either way.
        with pytest.raises(ModelError):
            await pool.work("a")
        assert len(pool.made) == (0 if expected else 1)
        await pool.end()

    run()


@in_jumping_time
async def test_pinned_model_is_never_evicted() -> None:
    pool = Pool(models("abc"), pinned="a", models=2)
    for name in "abcbc":
        await pool.work(name)
    assert "a" not in pool.counters.evicted
    await pool.pin("a", False)
    await pool.pin("c", True)
    await pool.work("b")
    assert list(pool.counters.evicted)[-1] == "a"
    await pool.end()


@in_jumping_time
async def test_without_room_beside_pinned_models_requests_are_refused_at_once() -> None:
    pool = Pool(models("abc"), pinned="ab", models=2)
    await asyncio.gather(pool.load("a"), pool.load("b"))
    began = now()
    with pytest.raises(Unavailable, match=r"beside the pinned models.*--memory-budget or MAX_CACHED_MODELS") as raised:
        await pool.work("c")
    assert now() == began
    assert raised.value.retry_after > 0
    assert pool.state("c") is PoolState.AVAILABLE
    await pool.pin("b", False)
    assert await pool.work("c") == "c"
    await pool.end()


@in_jumping_time
async def test_pinned_models_and_the_default_one_load_at_the_start() -> None:
    pool = Pool(models("abc"), pinned="c")
    await pool.start()
    assert pool.made == []
    await asyncio.sleep(3)
    assert pool.ready() == {"a", "c"}
    assert pool.view("a").in_use == 0
    await pool.end()


@in_jumping_time
async def test_pinned_models_have_their_room_before_the_default_one() -> None:
    pool = Pool(models("ab"), pinned="b", models=1)
    await pool.start()
    await asyncio.sleep(10)
    assert pool.world.history == ["+b"]
    await pool.end()


@pytest.mark.full
@in_jumping_time
async def test_failed_load_is_reported_to_all_and_not_retried_in_a_tight_loop() -> None:
    pool = Pool({"a": Model(error=ModelError("No such tensor."))}, retry_seconds=30.0)
    errors = await asyncio.gather(*(outcome(pool.work("a")) for _ in range(20)))
    assert {str(error) for error in errors} == {"No such tensor."}
    assert (pool.state("a"), pool.view("a").failure, len(pool.made)) == (PoolState.FAILED, "No such tensor.", 1)
    assert pool.counters.failures == {"ModelError": 1}
    tries = []
    for _ in range(1500):
        began, before = now(), len(pool.made)
        with pytest.raises(ModelError) as raised:
            await pool.work("a")
        assert len(traceback.extract_tb(raised.value.__traceback__)) < 10
        if len(pool.made) > before:
            tries.append(began)
        await asyncio.sleep(2)
    pauses = [round(later - sooner) for sooner, later in pairwise(tries)]
    assert [pause - 2 for pause in pauses[:4]] == pytest.approx([60, 120, 240, 480], abs=3)
    assert [pause - 2 for pause in pauses[4:]] == pytest.approx([600] * len(pauses[4:]), abs=3)
    pool.world.models["a"].error = None
    await asyncio.sleep(700)
    assert await pool.work("a") == "a"
    assert pool.view("a").failure is None
    await pool.unload("a")
    # It starts again with short pauses.
    pool.world.models["a"].error = ModelError("No such tensor.")
    await outcome(pool.work("a"))
    pool.world.models["a"].error = None
    await asyncio.sleep(30)
    assert await pool.work("a") == "a"
    await pool.end()


@in_jumping_time
async def test_room_of_a_failed_load_is_free_again() -> None:
    pool = Pool({"a": Model(error=ModelError("No.")), "b": Model()}, models=1)
    failed, served = pool.request("a"), pool.request("b")
    assert str(await outcome(failed)) == "No."
    assert await served == "b"
    assert pool.world.history == ["+a", "-a", "+b"]
    await pool.end()


@in_jumping_time
async def test_any_other_error_of_a_service_fails_the_load() -> None:
    class Broken(FakeService):
        async def settled(self) -> None:
            raise RuntimeError("a bug")

    world = Pool(models("a")).world
    pool = ModelPool(a_catalog(a_spec("a")), lambda spec, files: Broken(world, spec), PoolLimits())
    with pytest.raises(ModelError, match="a bug"):
        await pool.load("a")
    await pool.stop()


@in_jumping_time
async def test_service_that_cannot_be_made_fails_the_load() -> None:
    def refuse(spec: ModelSpec, files: Files | None) -> FakeService:
        raise BadRequest("No such setting.")

    pool = ModelPool(a_catalog(a_spec("a")), refuse, PoolLimits())
    with pytest.raises(BadRequest, match="No such setting"):
        await pool.load("a")
    await pool.stop()


@in_jumping_time
async def test_request_waits_a_limited_time_and_is_told_when_to_retry() -> None:
    pool = Pool({"a": Model(load=100.0)}, wait_seconds=60.0)
    began = now()
    with pytest.raises(Unavailable, match="still loading after a wait of 60 s") as raised:
        await pool.work("a")
    assert now() - began == pytest.approx(60.0)
    # Nothing is known of its load but that it has taken 60 seconds.
    assert raised.value.retry_after == 60
    await asyncio.sleep(raised.value.retry_after)
    assert await took(pool.load("a")) == 0.0
    await pool.unload("a")
    waiting = pool.request("a")
    await asyncio.sleep(10)
    with pytest.raises(Unavailable) as raised:
        await pool.work("a")
    # 30 seconds are left of the 100 that the last load took.
    assert raised.value.retry_after in (30, 31)
    assert isinstance(await outcome(waiting), Unavailable)
    await pool.end()


@in_jumping_time
async def test_unload_waits_for_running_requests_and_new_ones_load_it_again() -> None:
    pool = Pool(models("a"))
    running = pool.request("a", 10.0)
    await until(lambda: pool.view("a").in_use == 1)
    unloading = asyncio.create_task(pool.unload("a"))
    await asyncio.sleep(1)
    assert pool.state("a") is PoolState.DRAINING
    later = pool.request("a")
    await asyncio.sleep(1)
    assert (pool.view("a").in_use, pool.view("a").waiting) == (1, 1)
    assert (await running, await unloading, await later) == ("a", True, "a")
    assert pool.world.history == ["+a", "-a", "+a"]
    assert pool.counters.evictions == 0
    await pool.end()


@in_jumping_time
async def test_models_that_stay_are_not_unloaded() -> None:
    pool = Pool({"a": Model()}, unloads=False)
    await pool.load("a")
    with pytest.raises(Unsupported, match="Several hosts"):
        await pool.unload("a")
    assert pool.ready() == {"a"}
    await pool.end()


@in_jumping_time
async def test_requests_do_not_wait_for_a_service_that_takes_none() -> None:
    pool = Pool({"a": Model(load=1000.0)}, pinned=["a"], wait_seconds=60.0)
    await pool.start()
    await asyncio.sleep(1)
    pool.service("a").refusal = Unavailable("Another host takes them.")
    began = now()
    with pytest.raises(Unavailable, match="Another host"):
        await pool.load("a")
    assert now() == began
    await pool.end()


@in_jumping_time
async def test_requests_that_wait_already_are_refused_once_a_service_takes_none() -> None:
    """They waited for as long as a request may."""
    pool = Pool({"a": Model(load=1000.0)}, pinned=["a"], wait_seconds=60.0)
    await pool.start()
    waiting = pool.request("a")
    await asyncio.sleep(10)
    assert not waiting.done()
    pool.service("a").refusal = Unavailable("Another host takes them.")
    assert await took(outcome(waiting)) < 1
    assert "Another host" in str(waiting.exception())
    assert pool.state("a") is PoolState.LOADING
    await pool.end()


@in_jumping_time
async def test_unload_says_whether_there_was_anything_to_unload() -> None:
    pool = Pool(models("a"), pinned="a")
    assert not await pool.unload("a")
    await pool.load("a")
    assert await pool.unload("a", wait=False)
    assert pool.state("a") is PoolState.DRAINING
    assert await pool.unload("a")
    assert pool.state("a") is PoolState.AVAILABLE
    assert not await pool.unload("a")
    await pool.end()


@in_jumping_time
async def test_unload_ends_a_load_and_notifies_waiters() -> None:
    pool = Pool({"a": Model(load=1000.0)})
    waiting = pool.request("a")
    await asyncio.sleep(1)
    assert await took(pool.unload("a")) < 1
    assert "unloaded while it was loading" in str(await outcome(waiting))
    pool.world.models["a"].load = 1.0
    assert await pool.work("a") == "a"
    await pool.end()


@in_jumping_time
async def test_unload_lets_a_failed_model_be_tried_again() -> None:
    pool = Pool({"a": Model(error=ModelError("No."))})
    await outcome(pool.work("a"))
    pool.world.models["a"].error = None
    assert not await pool.unload("a")
    assert await pool.work("a") == "a"
    await pool.end()


@in_jumping_time
async def test_names_are_resolved_and_unknown_ones_refused() -> None:
    pool = Pool({"org-model": Model(), "org/other": Model()})
    assert await pool.work("org/model") == "org-model"
    assert await pool.work("org-other") == "org/other"
    assert await pool.unload("org/model")
    for wrong in (pool.work("none"), pool.unload("none"), pool.pin("none", True), pool.load("../etc")):
        with pytest.raises(ModelNotFound):
            await wrong
    await pool.end()


@in_jumping_time
async def test_engine_that_starts_again_is_waited_for() -> None:
    pool = Pool(models("a"))
    await pool.load("a")
    service = pool.service("a")
    service.die()
    assert await took(pool.work("a", 1.0)) == pytest.approx(3.0)
    assert (pool.made, pool.counters.loads, service.restarts) == ([service], 1, 1)
    await pool.end()


@in_jumping_time
async def test_engine_that_gives_up_fails_its_model_and_frees_its_room() -> None:
    pool = Pool(models("ab"), models=1)
    await pool.load("a")
    pool.service("a").die(ModelError("Memory ran out."))
    with pytest.raises(ModelError, match="Memory ran out"):
        await pool.work("a")
    assert await pool.work("b") == "b"
    assert (pool.state("a"), list(pool.counters.evicted)) == (PoolState.FAILED, [])
    assert pool.world.history == ["+a", "-a", "+b"]
    await asyncio.sleep(30)
    assert await pool.work("a") == "a"
    await pool.end()


@in_jumping_time
async def test_engine_that_gives_up_is_noticed_though_nobody_asks() -> None:
    pool = Pool(models("a"))
    await pool.start()
    await asyncio.sleep(5)
    pool.service("a").die(ModelError("Memory ran out."))
    await asyncio.sleep(1)
    assert (pool.state("a"), pool.world.live) == (PoolState.FAILED, [])
    await pool.end()


@in_jumping_time
async def test_failed_model_that_is_still_in_use_is_stopped_after_that() -> None:
    pool = Pool(models("a"), retry_seconds=1.0)
    running = pool.request("a", 20.0)
    await until(lambda: pool.view("a").in_use == 1)
    pool.service("a").die(ModelError("Memory ran out."))
    assert isinstance(await outcome(pool.work("a")), ModelError)
    await asyncio.sleep(2)
    # It may be tried again, but not beside itself.
    again = pool.request("a")
    assert (await running, await again) == ("a", "a")
    assert pool.world.history == ["+a", "-a", "+a"]
    await pool.end()


@in_jumping_time
async def test_model_whose_engine_starts_again_and_again_makes_room_for_others() -> None:
    pool = Pool(models("ab"), models=1)
    await pool.load("a")
    pool.world.models["a"].load = 10_000.0
    pool.service("a").die()
    waiting = pool.request("a")
    await asyncio.sleep(5)
    assert await pool.work("b") == "b"
    pool.world.models["a"].load = 1.0
    assert await waiting == "a"
    await pool.end()


@in_jumping_time
async def test_draining_model_whose_engine_starts_again_stays_draining() -> None:
    pool = Pool({"a": Model(load=10.0), "b": Model()}, models=1, wait_seconds=200.0)
    long = pool.request("a", 100.0)
    await until(lambda: pool.view("a").in_use == 1)
    await asyncio.sleep(20)
    other = pool.request("b")
    await until(lambda: pool.state("a") is PoolState.DRAINING)
    pool.service("a").die()
    late = pool.request("a")
    await asyncio.sleep(20)
    assert (pool.state("a"), pool.view("a").waiting) == (PoolState.DRAINING, 1)
    assert [await each for each in (long, other, late)] == ["a", "b", "a"]
    await pool.end()


@in_jumping_time
async def test_model_drained_during_an_engine_restart_admits_nobody_once_it_is_ready() -> None:
    pool = Pool({"a": Model(load=10.0), "b": Model()}, models=1, wait_seconds=200.0)
    long = pool.request("a", 100.0)
    await until(lambda: pool.view("a").in_use == 1)
    await asyncio.sleep(20)
    pool.service("a").die()
    late = pool.request("a")
    await asyncio.sleep(1)
    other = pool.request("b")
    await asyncio.sleep(20)
    assert (pool.state("a"), pool.view("a").waiting) == (PoolState.DRAINING, 1)
    assert [await each for each in (long, other, late)] == ["a", "b", "a"]
    await pool.end()


@in_jumping_time
async def test_model_that_need_not_drain_any_more_takes_requests_only_once_its_engine_is_ready() -> None:
    pool = Pool({"a": Model(load=10.0), "b": Model()}, models=1)
    long = pool.request("a", 100.0)
    await until(lambda: pool.view("a").in_use == 1)
    await asyncio.sleep(20)
    other = pool.request("b")
    await until(lambda: pool.state("a") is PoolState.DRAINING)
    pool.service("a").die()
    late = pool.request("a")
    await asyncio.sleep(1)
    other.cancel()
    await asyncio.sleep(1)
    assert (pool.state("a"), pool.view("a").in_use, pool.view("a").waiting) == (PoolState.LOADING, 1, 1)
    assert await late == "a"
    await long
    await pool.end()


@in_jumping_time
async def test_adapter_uses_the_service_of_its_base() -> None:
    pool = Pool(models("ab"), adapters={"one": "a", "two": "a"}, models=1)
    async with pool.use("one") as (spec, service), pool.use("a") as (base_spec, base_service):
        assert (spec.name, spec.adapter, base_spec.name) == ("one", "one", "a")
        assert service is base_service
        assert [pool.view(name).in_use for name in ("a", "one", "two")] == [1, 1, 0]
    assert [pool.state(name) for name in ("a", "one", "two", "b")] == ["ready", "ready", "ready", "available"]
    assert sum(view.bytes for view in pool.views()) == 100 * MIB
    assert await pool.unload("two")
    assert pool.world.live == []
    await pool.end()


@in_jumping_time
async def test_adapter_on_an_adapter_is_refused() -> None:
    pool = Pool(models("a"), adapters={"one": "a", "two": "one"})
    with pytest.raises(ModelError, match="The base of two is one"):
        await pool.work("two")
    await pool.end()


@in_jumping_time
async def test_idle_models_are_unloaded_but_not_pinned_ones() -> None:
    pool = Pool(models("abc"), pinned="b", idle_seconds=60.0)
    await pool.start()
    await asyncio.sleep(5)
    long = pool.request("c", 500.0)
    await asyncio.sleep(70)
    assert pool.ready() == {"b", "c"}
    assert await long == "c"
    await asyncio.sleep(50)
    assert pool.ready() == {"b", "c"}
    await asyncio.sleep(20)
    assert pool.ready() == {"b"}
    assert await pool.work("a") == "a"
    await pool.end()


@in_jumping_time
async def test_stop_ends_loads_waiters_and_running_services() -> None:
    pool = Pool({"a": Model(), "b": Model(load=1000.0), "c": Model(), "d": Model()}, models=3)
    await pool.start()
    running = pool.request("a", 5.0)
    await until(lambda: pool.view("a").in_use == 1)
    await pool.load("d")
    waiting = [pool.request("b"), pool.request("b"), pool.request("c")]
    leaving = asyncio.create_task(pool.unload("d"))
    await asyncio.sleep(0.1)
    assert await took(pool.end_early()) < 1
    assert {str(await outcome(each)) for each in waiting} == {"The server is shutting down."}
    assert (await leaving, await running, pool.world.live) == (True, "a", [])
    with pytest.raises(Unavailable, match="shutting down"):
        await pool.work("a")
    await pool.stop()


@in_jumping_time
async def test_stop_of_a_pool_that_never_started_is_harmless() -> None:
    await Pool(models("a")).end()


@in_jumping_time
async def test_views_report_each_models_state() -> None:
    pool = Pool({"a": Model(mib=10, device_mib=20), "b": Model(), "c": Model()}, pinned="b")
    running = pool.request("a", 5.0)
    await until(lambda: pool.view("a").in_use == 1)
    waiting = pool.request("b")
    await asyncio.sleep(1)
    a, b, c = pool.views()
    assert (a.state, a.in_use, a.waiting, a.bytes, a.device_bytes, a.loads) == ("ready", 1, 0, 10 * MIB, 20 * MIB, 1)
    assert (b.state, b.pinned, b.in_use, b.waiting, b.loads, b.load_seconds) == ("loading", True, 0, 1, 0, None)
    assert (c.state, c.bytes, c.last_used, c.service, c.failure) == ("available", 0, None, None, None)
    await asyncio.gather(running, waiting)
    await pool.end()


@in_jumping_time
async def test_base_is_reloaded_for_adapters_found_since_and_nobody_is_cut_off() -> None:
    pool = Pool(models("ab", fetch=1.0), adapters={"one": "a"})
    long = [pool.request(name, 20.0) for name in ("a", "one")]
    await until(lambda: pool.view("one").in_use == 1)
    found = {"a": a_spec("a", adapters=["one", "two", "three"]), "b": a_spec("b")}
    pool.catalog = a_catalog(*found.values(), *(a_spec(name, base="a") for name in ("one", "two", "three")))
    # Who asks for others than the new one needs no reload.
    assert await pool.work("one") == "one"
    assert pool.counters.loads == 1
    new = [pool.request(name) for name in ("two", "three", "two", "a")]
    assert await asyncio.gather(*long, *new) == ["a", "one", "two", "three", "two", "a"]
    assert (pool.counters.loads, pool.world.history) == (2, ["+a", "-a", "+a"])
    assert [service.spec for service in pool.made] == [a_spec("a", adapters=["one"]), found["a"]]
    assert await pool.work("three") == "three"
    assert pool.counters.loads == 2
    await pool.end()


@in_jumping_time
async def test_adapter_found_while_its_base_is_on_its_way_comes_with_the_next_load() -> None:
    pool = Pool(models("a", fetch=10.0, load=10.0), adapters={})
    first = pool.request("a")
    await asyncio.sleep(5)
    pool.catalog = a_catalog(a_spec("a", adapters=["one"]), a_spec("one", base="a"))
    late = pool.request("one")
    assert [await first, await late] == ["a", "one"]
    assert pool.world.history == ["+a", "-a", "+a"]
    await pool.end()


@in_jumping_time
async def test_adapter_gone_while_it_was_waited_for_is_unknown() -> None:
    pool = Pool(models("a", load=10.0))
    first = pool.request("a")
    await until(lambda: pool.world.history == ["+a"])
    pool.catalog = a_catalog(a_spec("a", adapters=["one"]), a_spec("one", base="a"))
    late = pool.request("one")
    await asyncio.sleep(1)
    pool.catalog = a_catalog(a_spec("a"))
    again = pool.request("a")
    assert [await first, await again] == ["a", "a"]
    assert isinstance(await outcome(late), ModelNotFound)
    assert pool.counters.loads == 1
    await pool.end()

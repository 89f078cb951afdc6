"""More models than room: all are served, none starves, and swaps stay few."""

import asyncio
from collections import Counter
from random import Random

import pytest
from jumping_loop import in_jumping_time, run_in_jumping_time
from pool_world import MIB, Model, Pool, now, outcome, took, until

from ostro.errors import Unavailable
from ostro.pool.pool import PoolState


@in_jumping_time
async def test_burst_over_three_models_with_room_for_two() -> None:
    pool = Pool({name: Model() for name in "abc"}, memory=250 * MIB)
    names = [("abc" * 67)[number] for number in range(200)]
    served = await asyncio.gather(*(pool.work(name, 0.1 + number % 7) for number, name in enumerate(names)))
    assert served == names
    assert (pool.counters.loads, pool.counters.evictions) == (3, 1)
    await pool.end()


@pytest.mark.cases(11)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("load", [0.1, 1.0, 10.0])
def test_steady_load_over_three_models(load: float, room: int, seed: int) -> None:
    """Twenty clients, each with one request after the other, 200 in all."""
    random = Random(seed)

    async def client(pool: Pool, served: Counter[str]) -> None:
        for _ in range(10):
            served[await pool.work(random.choice("abc"), random.uniform(0.01, 2.0))] += 1
            await asyncio.sleep(random.choice([0.0, 0.001, 0.3]))

    async def run() -> None:
        pool = Pool({name: Model(load=load, stop=0.1 * load) for name in "abc"}, models=room)
        served: Counter[str] = Counter()
        await asyncio.gather(*(client(pool, served) for _ in range(20)))
        assert served.total() == 200
        assert set(served) == set("abc")
        assert pool.counters.loads <= 40
        await pool.end()

    run_in_jumping_time(run())


@in_jumping_time
async def test_clients_with_one_request_after_the_other_do_not_swap_for_each() -> None:
    """Two clients, two models, room for one. Each leaves its model idle for a moment after each request."""
    pool = Pool({name: Model(load=5.0) for name in "ab"}, models=1)

    async def client(name: str) -> None:
        for _ in range(100):
            await pool.work(name, 0.1)
            await asyncio.sleep(0.01)

    await asyncio.gather(client("a"), client("b"))
    assert pool.counters.loads <= 2 * (100 * 0.11 / 5.0 + 1)
    await pool.end()


@in_jumping_time
async def test_swap_of_idle_models_loses_little_time() -> None:
    pool = Pool({name: Model(load=5.0, stop=0.1) for name in "ab"}, models=1)
    for name in "abababab":
        assert await took(pool.work(name, 0.1)) < 1.3 * 5.0
    await pool.end()


@in_jumping_time
async def test_busy_model_is_drained_for_those_who_wait() -> None:
    """A stream of requests that never leaves a idle does not keep b out."""
    pool = Pool({name: Model() for name in "ab"}, models=1)
    stop = asyncio.Event()

    async def stream(offset: float) -> None:
        await asyncio.sleep(offset)
        while not stop.is_set():
            await pool.work("a", 4.0)

    streams = [asyncio.create_task(stream(offset)) for offset in (0.0, 1.0, 2.0, 3.0)]
    await asyncio.sleep(20)
    # One second of patience, four until the last request has ended, the swap itself.
    assert await took(pool.work("b", 0.5)) < 1 + 4 + 0.25 + 2 + 0.5 + 0.1
    assert list(pool.counters.evicted) == ["a"]
    stop.set()
    await asyncio.gather(*streams)
    await pool.end()


@in_jumping_time
async def test_draining_model_takes_no_new_requests_and_they_are_served_later() -> None:
    pool = Pool({name: Model() for name in "ab"}, models=1)
    long = pool.request("a", 30.0)
    await until(lambda: pool.view("a").in_use == 1)
    other = pool.request("b")
    await until(lambda: pool.state("a") is PoolState.DRAINING)
    late = pool.request("a")
    await asyncio.sleep(5)
    assert (pool.view("a").in_use, pool.view("a").waiting) == (1, 1)
    assert [await each for each in (long, other, late)] == ["a", "b", "a"]
    assert pool.world.history == ["+a", "-a", "+b", "-b", "+a"]
    await pool.end()


@in_jumping_time
async def test_model_is_not_drained_before_it_was_ready_for_as_long_as_it_loaded() -> None:
    pool = Pool({"a": Model(load=20.0), "b": Model()}, models=1)
    long = pool.request("a", 100.0)
    other = asyncio.create_task(outcome(pool.work("b")))
    await until(lambda: pool.state("a") is PoolState.READY)
    ready = now()
    await until(lambda: pool.state("a") is PoolState.DRAINING)
    assert now() - ready == pytest.approx(20.0, abs=0.1)
    await asyncio.gather(long, other)
    await pool.end()


@in_jumping_time
async def test_least_recently_loaded_of_the_busy_models_is_drained() -> None:
    pool = Pool({name: Model() for name in "abc"}, models=2)
    running = [pool.request("b", 60.0)]
    await asyncio.sleep(5)
    running.append(pool.request("a", 10.0))
    await asyncio.sleep(8)
    running.append(pool.request("c"))
    await asyncio.sleep(1.5)
    assert [pool.state(name) for name in "ab"] == ["ready", "draining"]
    # But room is room: a is idle first, so b may stay.
    assert await running[2] == "c"
    assert (list(pool.counters.evicted), pool.state("b")) == (["a"], PoolState.READY)
    await asyncio.gather(*running)
    await pool.end()


@in_jumping_time
async def test_model_is_not_drained_while_nobody_waits() -> None:
    pool = Pool({name: Model() for name in "ab"}, models=1)
    long = pool.request("a", 50.0)
    await until(lambda: pool.view("a").in_use == 1)
    await asyncio.sleep(5)
    assert pool.state("a") is PoolState.READY
    other = pool.request("b")
    await until(lambda: pool.state("a") is PoolState.DRAINING)
    late = pool.request("a", 1.0)
    await asyncio.sleep(1)
    other.cancel()
    # Who waited is gone: a goes on, and lets in who waits for it.
    assert await late == "a"
    assert (pool.state("a"), long.done()) == (PoolState.READY, False)
    await long
    assert pool.world.history == ["+a"]
    await pool.end()


@in_jumping_time
async def test_pin_ends_the_drain() -> None:
    pool = Pool({name: Model() for name in "ab"}, models=1)
    long = pool.request("a", 50.0)
    await until(lambda: pool.view("a").in_use == 1)
    other = asyncio.create_task(outcome(pool.work("b")))
    await until(lambda: pool.state("a") is PoolState.DRAINING)
    await pool.pin("a", True)
    assert pool.state("a") is PoolState.READY
    assert "pinned" in str(await other)
    await long
    await pool.end()


@in_jumping_time
async def test_client_asked_to_retry_keeps_its_models_place() -> None:
    """Requests for a take longer than one for b may wait. If b's place were lost, a would always be refilled first."""
    pool = Pool({name: Model() for name in "ab"}, models=1, wait_seconds=10.0)
    await pool.start()
    stop = asyncio.Event()

    async def stream(offset: float) -> None:
        await asyncio.sleep(offset)
        while not stop.is_set():
            if isinstance(error := await outcome(pool.work("a", 35.0)), Unavailable):
                await asyncio.sleep(error.retry_after)

    async def insist() -> int:
        for tries in range(1, 20):
            result = await outcome(pool.work("b"))
            if result == "b":
                return tries
            assert isinstance(result, Unavailable)
            await asyncio.sleep(result.retry_after)
        raise AssertionError("b was never served")

    streams = [asyncio.create_task(stream(offset)) for offset in (0.0, 9.0, 18.0, 27.0)]
    await asyncio.sleep(40)
    assert await insist() <= 5
    stop.set()
    await asyncio.gather(*streams)
    await pool.end()


@in_jumping_time
async def test_place_of_a_client_that_never_retries_expires() -> None:
    pool = Pool({name: Model() for name in "ab"}, models=1, wait_seconds=10.0)
    await pool.start()
    long = pool.request("a", 100.0)
    await until(lambda: pool.view("a").in_use == 1)
    assert isinstance(await outcome(pool.work("b")), Unavailable)
    assert pool.state("a") is PoolState.DRAINING
    await asyncio.sleep(5)
    assert pool.state("a") is PoolState.READY
    await long
    assert pool.world.history == ["+a"]
    await pool.end()


@in_jumping_time
async def test_large_model_is_not_kept_out_by_small_ones() -> None:
    """Small ones come and go without end; the large one needs the room of all of them at a time."""
    small = {f"s{number}": Model(mib=100) for number in range(6)}
    pool = Pool(small | {"large": Model(mib=400)}, memory=400 * MIB)
    stop = asyncio.Event()

    async def stream(name: str) -> None:
        while not stop.is_set():
            await outcome(pool.work(name, 3.0))

    streams = [asyncio.create_task(stream(name)) for name in small for _ in range(2)]
    await asyncio.sleep(30)
    assert await took(pool.work("large")) < 20
    stop.set()
    await asyncio.gather(*streams)
    await pool.end()


@in_jumping_time
async def test_small_model_behind_a_large_one_takes_room_that_the_large_one_leaves() -> None:
    pool = Pool({"busy": Model(mib=500), "large": Model(mib=800), "small": Model(mib=100)}, memory=1000 * MIB)
    long = pool.request("busy", 50.0)
    await until(lambda: pool.view("busy").in_use == 1)
    large = pool.request("large")
    await asyncio.sleep(3)
    assert await took(pool.work("small", 1.0)) < 5
    assert not large.done()
    assert [await each for each in (long, large)] == ["busy", "large"]
    assert "-small" not in pool.world.history
    await pool.end()


@in_jumping_time
async def test_two_models_in_line_have_two_busy_ones_drained_at_a_time() -> None:
    pool = Pool({name: Model() for name in "abcd"}, models=2)
    running = [pool.request(name, 30.0) for name in "ab"]
    await asyncio.sleep(5)
    running += [pool.request(name) for name in "cd"]
    await asyncio.sleep(2)
    assert [pool.state(name) for name in "ab"] == ["draining", "draining"]
    assert await asyncio.gather(*running) == list("abcd")
    await pool.end()

"""Keys that ask for more models than there is room for take turns: no number of models lets one key starve another."""

import asyncio

import pytest
from jumping_loop import in_jumping_time, run_in_jumping_time
from pool_world import Model, Pool, now

LOAD, WORK = 2.0, 0.5


async def greedy(pool: Pool, name: str) -> None:
    """Always wants this model."""
    while True:
        await pool.work(name, WORK, key="greedy")


async def longest_wait(num_models: int, *, room: int = 1) -> float:
    """Of a modest key's ten requests, one after the other for one model, beside a greedy key that always wants
    `num_models` others.
    """
    names = [f"m{number}" for number in range(num_models)]
    pool = Pool({name: Model(load=LOAD) for name in (*names, "own")}, models=room, wait_seconds=3600.0)
    others = [asyncio.create_task(greedy(pool, name)) for name in names]
    await asyncio.sleep(20.0)
    waits = []
    for _ in range(10):
        began = now()
        await pool.work("own", WORK, key="modest")
        waits.append(now() - began - WORK)
        await asyncio.sleep(LOAD * 3)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await pool.end()
    return max(waits)


@pytest.mark.parametrize("num_models", [3, 20])
@pytest.mark.parametrize("room", [1, 2])
def test_however_many_models_a_key_wants_another_key_waits_for_few_of_them(room: int, num_models: int) -> None:
    """Models were loaded in the order of their requests, whoever sent them: with twenty, another key waited for all of
    them each time, and got 503s after a minute.
    """

    async def run() -> None:
        # What is being loaded and has its time, one turn of the other key, and its own load.
        assert await longest_wait(num_models, room=room) < 8 * LOAD

    run_in_jumping_time(run())


@in_jumping_time
async def test_one_key_alone_is_served_in_order_of_arrival() -> None:
    names = [f"m{number}" for number in range(6)]
    pool = Pool({name: Model(load=LOAD) for name in names}, models=1, wait_seconds=3600.0)
    ended: list[str] = []

    async def request(name: str) -> None:
        ended.append(await pool.work(name, WORK, key="only"))

    requests = []
    for name in reversed(names):
        requests.append(asyncio.create_task(request(name)))
        await asyncio.sleep(0.1)
    await asyncio.gather(*requests)
    await pool.end()
    assert ended == names[::-1]


@in_jumping_time
async def test_keys_that_want_one_model_each_have_equal_shares() -> None:
    pool = Pool({name: Model(load=LOAD) for name in "abc"}, models=1, wait_seconds=3600.0)
    served = dict.fromkeys("abc", 0)

    async def client(name: str) -> None:
        while True:
            await pool.work(name, WORK, key=name)
            served[name] += 1

    clients = [asyncio.create_task(client(name)) for name in "abc"]
    await asyncio.sleep(600.0)
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await pool.end()
    assert max(served.values()) <= 1.5 * min(served.values())

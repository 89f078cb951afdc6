"""Random schedules of everything at once. The world checks at each start and stop: no model twice, no limit passed, no
service stopped in use; here it is checked that each request ends as it should and that nothing is left over.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jumping_loop import run_in_jumping_time
from pool_world import MIB, Model, Pool, now, outcome

from ostro.engine_process.handle import State
from ostro.errors import ModelError, Unavailable
from ostro.pool.pool import PoolState

NAMES = "abcd"
WAIT = 20.0

name = st.sampled_from(NAMES)
seconds = st.sampled_from([0.0, 0.001, 0.1, 1.0, 5.0, 30.0])


@dataclass
class Use:
    name: str
    seconds: float
    cancel_after: float | None


@dataclass
class Do:
    what: str
    name: str


@dataclass
class Setting:
    models: dict[str, Model]
    pinned: list[str]
    patience: float
    limits: dict[str, Any]
    exact: bool
    steps: list[tuple[float, Use | Do]] = field(default_factory=list)


@st.composite
def settings_of_a_pool(draw: st.DrawFn) -> Setting:
    exact = draw(st.booleans())
    models = {
        name: Model(
            load=draw(st.sampled_from([0.001, 0.5, 2.0, 8.0])),
            stop=draw(st.sampled_from([0.0, 0.2, 3.0])),
            mib=draw(st.sampled_from([100, 200, 300])),
            expected=exact or draw(st.booleans()),
            fetch=draw(st.sampled_from([0.0, 0.0, 0.5, 5.0])),
        )
        for name in NAMES
    }
    act = st.sampled_from(["unload", "unload soon", "pin", "unpin", "die", "give up", "break", "mend", "load"])
    use = st.builds(Use, name, seconds, st.none() | seconds)
    return Setting(
        models=models,
        pinned=draw(st.lists(name, max_size=1)),
        patience=draw(st.sampled_from([0.0, 1.0])),
        limits={
            "models": draw(st.none() | st.integers(1, 3)),
            "memory": draw(st.none() | st.sampled_from([250 * MIB, 300 * MIB, 500 * MIB])),
            "wait_seconds": WAIT,
            "retry_seconds": 5.0,
            "idle_seconds": draw(st.none() | st.sampled_from([1.0, 60.0])),
            "fetches": draw(st.integers(1, 3)),
        },
        exact=exact,
        steps=draw(st.lists(st.tuples(seconds, use | use | use | st.builds(Do, act, name)), max_size=40)),
    )


async def do(pool: Pool, act: Do) -> None:
    model, service = pool.world.models[act.name], pool.view(act.name).service
    match act.what:
        case "unload":
            await pool.unload(act.name)
        case "unload soon":
            await pool.unload(act.name, wait=False)
        case "pin" | "unpin":
            await pool.pin(act.name, act.what == "pin")
        case "die" if service is not None and service.state is State.READY:
            service.die()
        case "give up" if service is not None and service.state in (State.READY, State.LOADING):
            service.die(ModelError("It gave up."))
        case "break":
            model.error = ModelError("It is broken.")
        case "mend":
            model.error = None
        case "load":
            await pool.load(act.name)


async def play(pool: Pool, setting: Setting) -> list[tuple[Use | Do, asyncio.Task[object]]]:
    tasks: list[tuple[Use | Do, asyncio.Task[object]]] = []
    for pause, step in setting.steps:
        await asyncio.sleep(pause)
        task: asyncio.Task[object]
        if isinstance(step, Use):
            task = asyncio.create_task(outcome(pool.work(step.name, step.seconds)))
            if step.cancel_after is not None:
                asyncio.get_running_loop().call_later(step.cancel_after, task.cancel)
        else:
            task = asyncio.create_task(outcome(do(pool, step)))
        tasks.append((step, task))
    return tasks


async def check_outcomes(tasks: list[tuple[Use | Do, asyncio.Task[object]]]) -> None:
    for step, task in tasks:
        [result] = await asyncio.gather(task, return_exceptions=True)
        match step:
            case Use():
                cancelled = isinstance(result, asyncio.CancelledError) and step.cancel_after is not None
                assert cancelled or result == step.name or isinstance(result, Unavailable | ModelError), repr(result)
            case Do():
                assert not isinstance(result, Exception) or isinstance(result, Unavailable | ModelError), repr(result)


def a_pool(setting: Setting) -> Pool:
    return Pool(setting.models, pinned=setting.pinned, patience=setting.patience, exact=setting.exact, **setting.limits)


@given(settings_of_a_pool())
@settings(max_examples=examples(80))
def test_whatever_happens_each_request_ends_and_nothing_is_left_over(setting: Setting) -> None:
    async def run() -> None:
        pool = a_pool(setting)
        await pool.start()
        tasks = await play(pool, setting)
        last = now()
        await check_outcomes(tasks)
        # An unload may wait for a request that waits for its turn first.
        assert now() - last <= 2 * (WAIT + 30.0) + 60.0
        await asyncio.sleep(120)
        assert all((view.in_use, view.waiting) == (0, 0) for view in pool.views())
        busy = (PoolState.FETCHING, PoolState.LOADING, PoolState.DRAINING)
        # A pinned model that cannot be loaded is tried again and again.
        tried = {view.name for view in pool.views() if view.pinned and pool.world.models[view.name].error is not None}
        assert not any(view.state in busy for view in pool.views() if view.name not in tried)
        assert set(pool.files.held) <= {view.name for view in pool.views() if view.service is not None}
        pool.world.check_limits()
        await serves_all(pool)
        await pool.end()

    run_in_jumping_time(run())


async def serves_all(pool: Pool) -> None:
    """Whatever happened before: every model that fits is served when it alone is asked for."""
    for name in NAMES:
        await pool.pin(name, False)
        await pool.unload(name)
        pool.world.models[name].error = None
    for name in NAMES:
        result = await outcome(pool.work(name))
        if pool.limits.memory is not None and pool.world.models[name].mib * MIB > pool.limits.memory:
            assert isinstance(result, ModelError)
        else:
            assert result == name


@given(settings_of_a_pool(), seconds)
@settings(max_examples=examples(50))
def test_stop_at_any_time_ends_everything(setting: Setting, moment: float) -> None:
    async def run() -> None:
        pool = a_pool(setting)
        await pool.start()
        tasks = await play(pool, setting)
        await asyncio.sleep(moment)
        began = now()
        await pool.end_early()
        assert now() - began <= 3.0
        await check_outcomes(tasks)
        await pool.end()

    run_in_jumping_time(run())

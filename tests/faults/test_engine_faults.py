"""Engines that die or hang while they serve: callers learn of it soon, and the next ones are served."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
from live_service import STALL, endless, live_service, set_faults, until, until_idle
from told_time import ToldTime

from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.errors import ModelError, OstroError, RequestRefused, Unavailable
from ostro.sampling_params import SamplingParams
from ostro.server.models.service import ModelService, State

# For a test that hangs.
PATIENCE = 60.0


async def outcome(service: ModelService, request: Request) -> OstroError | None:
    try:
        await service.complete(request)
    except OstroError as error:
        return error
    return None


async def start_streams(service: ModelService, count: int) -> list[asyncio.Task[OstroError | None]]:
    """All of them generating."""
    tasks = [asyncio.create_task(outcome(service, await endless(service))) for _ in range(count)]
    await until(lambda: service.heartbeat.running == count)
    return tasks


async def assert_works(service: ModelService) -> None:
    await asyncio.wait_for(service.settled(), PATIENCE)
    completion = await service.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))
    assert completion.num_generated == 3
    await until_idle(service)


def test_killed_engine_fails_its_streams_at_once_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.005")

    async def scenario() -> None:
        async with live_service() as service:
            tasks = await start_streams(service, 8)
            assert service.engine_pid is not None
            os.kill(service.engine_pid, signal.SIGKILL)
            errors = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
            assert all(isinstance(error, Unavailable) for error in errors)
            assert service.num_requests == 0
            with pytest.raises(Unavailable, match="restarting after a failure"):
                await service.prepare("Hello", SamplingParams())
            await assert_works(service)
            assert service.restarts == 1

    asyncio.run(scenario())


@pytest.mark.full
def test_engine_that_crashes_in_a_step_is_replaced_as_often_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "crash_after=5")

    async def scenario() -> None:
        async with live_service() as service:
            for deaths in (1, 2):
                assert isinstance(await outcome(service, await endless(service)), Unavailable)
                await asyncio.wait_for(service.settled(), PATIENCE)
                assert service.restarts == deaths
            await assert_works(service)

    asyncio.run(scenario())


@pytest.mark.full
def test_stuck_engine_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "stall_after=5")
    time = ToldTime()

    async def scenario() -> None:
        async with live_service(sleep=time.sleep) as service:
            before = service.engine_pid
            task = asyncio.create_task(outcome(service, await endless(service)))
            await until(lambda: service.heartbeat.counters.steps == 5)
            await time.let_pass(STALL + 1)
            error = await asyncio.wait_for(task, PATIENCE)
            assert isinstance(error, Unavailable)
            assert "no progress for 60 s" in error.message
            await until_restarting(service, time)
            await assert_works(service)
            assert service.engine_pid != before

    asyncio.run(scenario())


async def until_restarting(service: ModelService, time: ToldTime) -> None:
    """The pause before a restart begins when the process has ended."""
    while not service.restarts:
        await time.let_pass(1)
        await asyncio.sleep(0.01)


@pytest.mark.full
def test_frozen_engine_process_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.01")
    time = ToldTime()

    async def scenario() -> None:
        async with live_service(sleep=time.sleep) as service:
            tasks = await start_streams(service, 2)
            assert service.engine_pid is not None
            os.kill(service.engine_pid, signal.SIGSTOP)
            # What it had sent before is progress.
            while not all(task.done() for task in tasks):
                await time.let_pass(STALL + 1)
                await asyncio.sleep(0.01)
            assert all(isinstance(task.result(), Unavailable) for task in tasks)
            await until_restarting(service, time)
            await assert_works(service)

    asyncio.run(scenario())


def has_stepped(service: ModelService, since: int) -> bool:
    return service.heartbeat.counters.steps > since


@pytest.mark.full
def test_long_prefill_is_not_called_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first token takes longer than an engine may be without progress; its chunks do not."""
    set_faults(monkeypatch, "step_seconds=0.2")
    time = ToldTime()

    async def scenario() -> None:
        async with live_service(EngineConfig(max_batch_tokens=8), sleep=time.sleep) as service:
            request = await service.prepare([1] * 2000, SamplingParams(max_tokens=1))
            task = asyncio.create_task(outcome(service, request))
            for _ in range(3):
                await until(partial(has_stepped, service, since=service.heartbeat.counters.steps))
                await time.let_pass(0.8 * STALL)
            assert (service.heartbeat.counters.generated_tokens, service.restarts) == (0, 0)
            task.cancel()

    asyncio.run(scenario())


@pytest.mark.full
def test_idle_engine_and_slow_reader_are_not_called_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)
    time = ToldTime()

    async def scenario() -> None:
        async with live_service(sleep=time.sleep) as service:
            generation = service.stream(await service.prepare("Hello", SamplingParams(max_tokens=50, ignore_eos=True)))
            await generation.__anext__()
            await until(lambda: service.heartbeat.counters.generated_tokens == 50)
            await time.let_pass(2 * STALL)
            async for _ in generation:
                pass
            assert generation.completion.num_generated == 50
            await time.let_pass(2 * STALL)
            assert service.restarts == 0
            await assert_works(service)

    asyncio.run(scenario())


@pytest.mark.full
def test_event_loop_that_was_held_up_does_not_blame_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In real time: no message is read while the loop stands still."""
    set_faults(monkeypatch, "step_seconds=0.01")

    async def scenario() -> None:
        service = ModelService(EngineConfig(), stall_seconds=2.0)
        await service.start()
        try:
            await service.settled()
            generation = service.stream(await endless(service))
            await generation.__anext__()
            time.sleep(3)
            await asyncio.sleep(1)
            await generation.__anext__()
            await generation.aclose()
            assert service.restarts == 0
        finally:
            await service.stop()

    asyncio.run(scenario())


def test_long_load_is_not_called_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "load_seconds=60")
    time = ToldTime()

    async def scenario() -> None:
        service = ModelService(EngineConfig(), load_stall_seconds=10 * STALL, stall_seconds=STALL, sleep=time.sleep)
        await service.start()
        try:
            await until(lambda: service.engine_pid is not None)
            await time.let_pass(5 * STALL)
            assert (service.state, service.restarts) == (State.LOADING, 0)
        finally:
            await service.stop()

    asyncio.run(scenario())


@pytest.mark.full
def test_load_that_makes_no_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a dead file system the model stayed `loading` for good."""
    set_faults(monkeypatch, "load_seconds=600")
    time = ToldTime()

    async def scenario() -> None:
        service = ModelService(EngineConfig(), load_stall_seconds=1.0, sleep=time.sleep)
        await service.start()
        try:
            settling = asyncio.create_task(service.settled())
            while not settling.done():
                await time.let_pass(1)
                await asyncio.sleep(0.01)
            with pytest.raises(ModelError, match="no progress for 1 s while it loaded the model"):
                await settling
            assert (service.state, service.restarts) == (State.FAILED, 0)
        finally:
            await service.stop()

    asyncio.run(scenario())


@pytest.mark.full
def test_slow_load_that_gets_on_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "load_work=5")

    async def scenario() -> None:
        service = ModelService(EngineConfig(), load_stall_seconds=4.0)
        await service.start()
        try:
            await asyncio.wait_for(service.settled(), 60)
            assert service.restarts == 0
        finally:
            await service.stop()

    asyncio.run(scenario())


@pytest.mark.full
def test_request_that_kills_the_engine_twice_is_refused_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send again what failed, and with every retry all other requests were lost."""
    set_faults(monkeypatch, "crash_length=7")

    async def scenario() -> None:
        async with live_service() as service:
            killer = [1, 2, 3, 4, 5, 6, 7]
            for deaths in (1, 2):
                error = await outcome(service, await service.prepare(killer, SamplingParams(max_tokens=4)))
                assert isinstance(error, Unavailable)
                await asyncio.wait_for(service.settled(), 30)
                assert service.restarts == deaths
            error = await outcome(service, await service.prepare(killer, SamplingParams(max_tokens=4)))
            assert isinstance(error, RequestRefused)
            await assert_works(service)
            assert service.restarts == 2

    asyncio.run(scenario())


@pytest.mark.full
def test_requests_that_ran_beside_a_killer_are_not_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever's retries ran beside those of a killer was refused for ten minutes, too."""
    set_faults(monkeypatch, "crash_length=7")

    async def scenario() -> None:
        async with live_service() as service:
            killer = await service.prepare([1] * 7, SamplingParams(max_tokens=4))
            others = [await service.prepare([number] * 3, SamplingParams(max_tokens=4)) for number in range(2, 6)]
            for deaths in (1, 2):
                sent = [replace(request, id=-10 * deaths - at) for at, request in enumerate([killer, *others])]
                errors = await asyncio.gather(*(outcome(service, request) for request in sent))
                assert isinstance(errors[0], Unavailable)
                await asyncio.wait_for(service.settled(), 30)
            assert isinstance(await outcome(service, replace(killer, id=-30)), RequestRefused)
            assert await asyncio.gather(
                *(outcome(service, replace(request, id=-40 - at)) for at, request in enumerate(others))
            ) == [None] * len(others)
            assert service.restarts == 2

    asyncio.run(scenario())


@pytest.mark.full
def test_requests_that_only_waited_when_the_engine_died_are_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "crash_length=7")

    async def scenario() -> None:
        async with live_service(EngineConfig(max_batch_seqs=1)) as service:
            waiting = await service.prepare([1, 2, 3], SamplingParams(max_tokens=4))
            for deaths in (1, 2):
                killer = await service.prepare([deaths] * 7, SamplingParams(max_tokens=4))
                errors = await asyncio.gather(outcome(service, killer), outcome(service, replace(waiting, id=-deaths)))
                assert all(isinstance(error, Unavailable) for error in errors)
                await asyncio.wait_for(service.settled(), 30)
            assert await outcome(service, replace(waiting, id=-3)) is None

    asyncio.run(scenario())

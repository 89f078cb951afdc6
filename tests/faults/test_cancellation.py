"""Callers who leave, in each phase of a request: the engine stops working for them and has all its pages back."""

import asyncio
from typing import Any

import pytest
from live_service import endless, live_service, set_faults, until, until_idle

from ostro.config import EngineConfig
from ostro.sampling_params import SamplingParams
from ostro.server.models.service import Generation, ModelService


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def assert_all_freed(service: ModelService) -> None:
    await until_idle(service)
    steps, before = service.heartbeat.counters.steps, service.heartbeat
    await until(lambda: service.heartbeat is not before)
    assert service.heartbeat.counters.steps == steps, "the engine goes on for nobody"
    assert service.restarts == 0


@pytest.mark.full
def test_caller_who_leaves_while_queued_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.005")

    async def scenario() -> None:
        async with live_service(EngineConfig(max_batch_seqs=1)) as service:
            running = asyncio.create_task(service.complete(await endless(service)))
            queued = asyncio.create_task(service.complete(await endless(service)))
            await until(lambda: (service.heartbeat.running, service.heartbeat.waiting) == (1, 1))
            await leave(queued)
            await until(lambda: (service.heartbeat.running, service.heartbeat.waiting) == (1, 0))
            await leave(running)
            await assert_all_freed(service)

    asyncio.run(scenario())


@pytest.mark.full
def test_caller_who_leaves_while_the_prompt_is_computed_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.05")

    async def scenario() -> None:
        async with live_service(EngineConfig(max_batch_tokens=8)) as service:
            request = await service.prepare([1] * 4000, SamplingParams(max_tokens=1, n=3))
            task = asyncio.create_task(service.complete(request))
            await until(lambda: service.heartbeat.counters.computed_tokens > 16)
            assert service.heartbeat.counters.generated_tokens == 0
            await leave(task)
            await assert_all_freed(service)

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.parametrize("how", ["close", "cancel"])
def test_caller_who_leaves_while_streaming_frees_everything(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    set_faults(monkeypatch, "step_seconds=0.005")

    async def read(generation: Generation, most: int) -> None:
        for _ in range(most):
            await anext(generation)

    async def scenario() -> None:
        async with live_service() as service:
            generation = service.stream(await endless(service, n=2))
            await read(generation, 5)
            if how == "close":
                await generation.aclose()
            else:
                task = asyncio.create_task(read(generation, 1_000_000))
                await asyncio.sleep(0)
                await leave(task)
            await assert_all_freed(service)

    asyncio.run(scenario())


def test_caller_who_leaves_while_waiting_for_the_whole_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.005")

    async def scenario() -> None:
        async with live_service() as service:
            task = asyncio.create_task(service.complete(await endless(service)))
            await until(lambda: service.heartbeat.counters.generated_tokens > 10)
            await leave(task)
            await assert_all_freed(service)

    asyncio.run(scenario())


@pytest.mark.full
def test_stream_that_was_never_read_asks_nothing_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def scenario() -> None:
        async with live_service() as service:
            generation = service.stream(await endless(service))
            assert service.num_requests == 0
            await generation.aclose()
            await assert_all_freed(service)

    asyncio.run(scenario())

"""A service with a real engine process, for tests; the fake runner in it unless a model directory is given."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from warm_engines import warm_engines

from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.engine_process.handle import Sleep
from ostro.pool.catalog import Catalog, ModelSpec
from ostro.pool.pool import ModelPool, PoolLimits
from ostro.sampling_params import SamplingParams
from ostro.server.models.served import Models
from ostro.server.models.service import ModelService

STALL = 60.0
"""Seconds after which a live service's engine counts as stuck."""


def set_faults(monkeypatch: pytest.MonkeyPatch, *faults: str) -> None:
    """Sets faults for the engine processes that the test starts from now on."""
    monkeypatch.setenv("OSTRO_FAULTS", ",".join(("fake", *faults)))


@asynccontextmanager
async def live_service(
    config: EngineConfig | None = None, *, sleep: Sleep = asyncio.sleep
) -> AsyncIterator[ModelService]:
    """Ready when it is entered, and stopped when it is left."""
    service = ModelService(config or EngineConfig(), stall_seconds=STALL, sleep=sleep)
    with warm_engines():
        await service.start()
        try:
            await service.settled()
            yield service
        finally:
            await service.stop()


@asynccontextmanager
async def live_models(config: EngineConfig | None = None) -> AsyncIterator[tuple[Models, ModelService]]:
    """A pool of one model, and its service, which is ready."""
    spec = ModelSpec(name="default", config=config or EngineConfig(), pinned=True)
    catalog = Catalog([spec], make=lambda found: found, list_models=lambda root: [spec])
    pool = ModelPool(catalog, lambda spec, files: ModelService(spec.config), PoolLimits())
    with warm_engines():
        await pool.start()
        try:
            async with pool.use("default") as (_, service):
                pass
            yield Models(pool), service
        finally:
            await pool.stop()


async def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> float:
    """Waits for the condition; the seconds it took. The limit is for a test that hangs, not for a busy machine."""
    began = time.monotonic()
    while not condition():
        took = time.monotonic() - began
        assert took < seconds, f"waited {took:.1f} s in vain"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def until_idle(service: ModelService) -> None:
    """Waits for a heartbeat that shows nothing under way, and no page in use."""
    await until(lambda: service.num_requests == 0)
    before = service.heartbeat
    # A heartbeat that was sent before the last request ended does not count.
    await until(lambda: service.heartbeat is not before)
    await until(lambda: is_idle(service))


def is_idle(service: ModelService) -> bool:
    beat = service.heartbeat
    return (beat.running, beat.waiting) == (0, 0) and beat.pages_free + beat.pages_cached == beat.pages_total > 0


async def endless(service: ModelService, prompt: str = "Once upon a time", n: int = 1) -> Request:
    """A request that goes on until it is ended."""
    return await service.prepare(prompt, SamplingParams(max_tokens=None, ignore_eos=True, n=n, seed=1))

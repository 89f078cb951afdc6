"""The pool with what it is made for: real engine processes."""

import asyncio
import os
from pathlib import Path

import pytest
from model_directory import write_model

from ostro.config import EngineConfig
from ostro.errors import ModelNotFound
from ostro.pool.catalog import Catalog, ModelSpec
from ostro.pool.pool import ModelPool, PoolLimits, PoolState
from ostro.sampling_params import SamplingParams
from ostro.server.models.service import ModelService

NAMES = ("one", "two", "three")


def a_pool(root: Path, limits: PoolLimits) -> ModelPool[ModelService]:
    specs = [
        ModelSpec(name=name, config=EngineConfig(model=str(root / name), kv_memory=1 << 20, threads=1, device="cpu"))
        for name in (*NAMES, "missing")
    ]
    catalog = Catalog(specs, make=lambda spec: spec, list_models=lambda root: specs)
    return ModelPool(catalog, lambda spec, files: ModelService(spec.config), limits, patience=0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_three_models_with_room_for_two_answer_each_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OSTRO_FAULTS", raising=False)
    for seed, name in enumerate(NAMES):
        write_model(tmp_path / name, seed=seed)
    pids: set[int] = set()

    async def ask(pool: ModelPool[ModelService], name: str) -> tuple[str, tuple[int, ...]]:
        async with pool.use(name) as (spec, service):
            assert service.engine_pid is not None
            pids.add(service.engine_pid)
            completion = await service.generate("the quick", SamplingParams(max_tokens=8, temperature=0))
            return spec.name, tuple(completion.choices[0].token_ids)

    async def scenario() -> None:
        pool = a_pool(tmp_path, PoolLimits(models=2))
        try:
            answers = await asyncio.gather(*(ask(pool, NAMES[number % 3]) for number in range(60)))
            assert [name for name, _ in answers] == [NAMES[number % 3] for number in range(60)]
            # One answer for each model, and none like another's.
            assert len(set(answers)) == len({tokens for _, tokens in answers}) == 3
            assert (pool.counters.loads, pool.counters.evictions) == (3, 1)
            assert sum(map(is_alive, pids)) == 2
            assert sum(view.bytes > 0 for view in pool.views()) == 2
            for _ in range(2):
                with pytest.raises(ModelNotFound):
                    await ask(pool, "missing")
            assert pool.views()[-1].state is PoolState.FAILED
        finally:
            await pool.stop()
        assert not any(map(is_alive, pids))

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_stop_while_real_engines_load_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTRO_FAULTS", raising=False)
    write_model(tmp_path / "one")

    async def scenario() -> None:
        pool = a_pool(tmp_path, PoolLimits())
        await pool.start()
        while (service := pool.views()[0].service) is None or service.engine_pid is None:
            await asyncio.sleep(0.01)
        await pool.stop()
        assert not is_alive(service.engine_pid)

    asyncio.run(asyncio.wait_for(scenario(), 60))

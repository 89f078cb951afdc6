"""The disk below the native core's pages: another start finds what the last one computed, and gives the same tokens."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from native_directory import WIDE, write
from native_models import savable_model
from peft_directory import random_adapter

from ostro.backends.loading import load_runner
from ostro.backends.tiers.opening import open_tiers
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine_process.handle import EngineHandle
from ostro.errors import BadRequest, Unsupported
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint

PROMPT = tuple((7 * at + at * at) % 60 for at in range(70))
OTHERS = [tuple((each + 3 * at + at * at) % 60 for at in range(70)) for each in range(1, 5)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are kept from test to test, pages are not."""
    monkeypatch.setenv("OSTRO_CACHE", str(home / "cache"))
    shutil.rmtree(home / "cache" / "pages", ignore_errors=True)


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return write(home / "model")


def started(model: Path, **settings: object) -> EngineCore:
    given = {"kv_memory": 4 << 20, "threads": 1, **settings}
    config = EngineConfig(model=str(model), device="cpu", **given)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(model)
    runner = load_runner(checkpoint, config)
    return EngineCore(runner, adapters=config.adapter_names, tiers=open_tiers(checkpoint, config, runner))


def run(core: EngineCore, prompt: tuple[int, ...] = PROMPT, *, salt: str = "", adapter: str | None = None) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0)
    core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, cache_salt=salt, adapter=adapter))
    found: list[int] = []
    while core.has_work:
        for gain in core.step():
            found += gain.token_ids
        core.check_integrity()
    return found


def hits(core: EngineCore) -> int:
    return core.scheduler.counters.cache_hits


@pytest.fixture
def cold(model: Path) -> list[int]:
    return run(started(model))


def file_of(home: Path) -> Path:
    [path] = (home / "cache" / "pages").iterdir()
    return path


@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8"])
def test_the_next_start_finds_the_prompt_and_gives_the_same_tokens(model: Path, kv_dtype: str) -> None:
    cold = run(started(model, kv_dtype=kv_dtype))
    core = started(model, kv_dtype=kv_dtype, kv_persist=True)
    assert run(core) == cold
    core.close()
    core = started(model, kv_dtype=kv_dtype, kv_persist=True)
    assert run(core) == cold
    assert hits(core) == 64
    core.close()


def test_pages_that_do_not_fit_in_memory_are_read_back_from_disk(model: Path, tmp_path: Path, cold: list[int]) -> None:
    roomy = started(model)
    page = roomy.runner.spec.pages_bytes // roomy.runner.spec.num_pages
    core = started(model, kv_memory=11 * page, kv_disk=str(tmp_path / "disk"))
    assert run(core) == cold
    alone = [run(roomy, prompt) for prompt in OTHERS]
    assert [run(core, prompt) for prompt in OTHERS] == alone
    assert run(core) == cold
    assert core.scheduler.counters.fetched_disk_pages > 0
    core.close()
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.cases(2)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "of another model", "gone"])
def test_a_damaged_file_is_a_miss(model: Path, home: Path, cold: list[int], damage: str) -> None:
    core = started(model, kv_persist=True)
    run(core)
    core.close()
    path = file_of(home)
    content = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 3])
        case "flipped":
            noise = np.frombuffer(content, np.uint8).copy()
            noise[4096 + 200 :: 500] ^= 1
            path.write_bytes(noise.tobytes())
        case "of another model":
            content[20] ^= 1
            path.write_bytes(content)
        case _:
            path.unlink()
    core = started(model, kv_persist=True)
    assert run(core) == cold
    assert hits(core) < 64
    core.close()


@pytest.mark.full
def test_another_model_in_the_same_place_finds_nothing(model: Path) -> None:
    core = started(model, kv_persist=True)
    run(core)
    core.close()
    for settings in ({"quantize": "int8"}, {"kv_dtype": "int8"}, {"max_seq_len": 100}):
        core = started(model, kv_persist=True, **settings)
        run(core)
        assert hits(core) == 0
        core.close()


@pytest.mark.full
def test_pages_of_requests_with_a_salt_are_not_written(model: Path) -> None:
    core = started(model, kv_persist=True)
    run(core, salt="mine")
    core.close()
    core = started(model, kv_persist=True)
    run(core, salt="mine")
    run(core)
    assert hits(core) == 0
    core.close()


@pytest.mark.full
def test_an_adapter_finds_its_own_pages_until_its_files_change(model: Path, tmp_path: Path) -> None:
    paths = [random_adapter(tmp_path / f"adapter {seed}", savable_model(WIDE), seed=seed) for seed in (1, 2)]
    answers, found = [], []
    checkpoint = paths[0] / "checkpoint-1"
    checkpoint.mkdir()
    for path, adapter in [(paths[0], "mine"), (paths[0], "mine"), (paths[1], "mine"), (paths[1], None)]:
        core = started(model, kv_persist=True, adapters=(("mine", str(path)),))
        answers.append(run(core, adapter=adapter))
        found.append(hits(core))
        core.close()
        # Not the adapter's: what a training run leaves beside it.
        (checkpoint / "optimizer.pt").write_bytes(b"state")
    assert found == [0, 64, 0, 0]
    assert answers[0] == answers[1]


def test_a_second_engine_runs_without_the_file_that_the_first_uses(
    model: Path, cold: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    core = started(model, kv_persist=True)
    second = started(model, kv_persist=True)
    assert second.tiers is None
    assert "in use by another process" in caplog.text
    assert run(second) == cold
    core.close()


@pytest.mark.full
def test_an_engine_process_writes_prefixes_when_it_is_stopped(model: Path) -> None:
    """As a server's end or a model's eviction stops it."""
    params = SamplingParams(max_tokens=2, temperature=0)
    request = Request(id=1, prompt_ids=PROMPT, params=params, seed=0)

    async def cached() -> int:
        handle = EngineHandle(
            EngineConfig(model=str(model), device="cpu", threads=1, kv_memory=4 << 20, kv_persist=True)
        )
        handle.start()
        try:
            await handle.settled()
            return max([progress.num_cached async for batch in handle.submit(request) for progress in batch])
        finally:
            await handle.stop()

    assert [asyncio.run(cached()) for _ in range(2)] == [0, 64]


def test_impossible_settings_are_refused_by_name(model: Path) -> None:
    with pytest.raises(BadRequest, match="kv_host_memory is for NVIDIA GPUs"):
        started(model, kv_host_memory=1 << 30)
    with pytest.raises(BadRequest, match="kv_disk_size needs kv_disk or kv_persist"):
        started(model, kv_disk_size=1 << 30)
    with pytest.raises(BadRequest, match="kv_persist is for cached prefixes"):
        started(model, kv_persist=True, prefix_caching=False)
    with pytest.raises(Unsupported, match=r"kv_persist needs .* the native CPU core, .*: backend is torch"):
        started(model, kv_persist=True, backend="torch")
    with pytest.raises(Unsupported, match="kv_persist does not work with JAX"):
        started(model, kv_persist=True, backend="jax", threads="auto")

"""Engines of the native core that leave prefixes to one another: a prompt that one has computed gives another the same
tokens, to the last bit.
"""

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
from native_directory import WIDE, write
from native_models import savable_model
from peft_directory import random_adapter

from ostro.backends.loading import load_runner
from ostro.backends.tiers.opening import open_tiers
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine_process.handle import EngineHandle, Stream
from ostro.errors import BadRequest, Unavailable
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint

PROMPT = tuple((7 * at + at * at) % 60 for at in range(70))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are kept from test to test, prefixes are not."""
    monkeypatch.setenv("OSTRO_CACHE", str(home / "cache"))
    shutil.rmtree(home / "shared", ignore_errors=True)


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return write(home / "model")


def config_of(model: Path, **settings: object) -> EngineConfig:
    given = {"kv_memory": 4 << 20, "threads": 1, "kv_shared": str(model.parent / "shared"), **settings}
    return EngineConfig(model=str(model), device="cpu", **given)  # type: ignore[arg-type]


def started(model: Path, **settings: object) -> EngineCore:
    config, checkpoint = config_of(model, **settings), open_checkpoint(model)
    runner = load_runner(checkpoint, config)
    return EngineCore(runner, adapters=config.adapter_names, tiers=open_tiers(checkpoint, config, runner))


def run(core: EngineCore, adapter: str | None = None) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0)
    core.add(Request(id=0, prompt_ids=PROMPT, params=params, seed=0, adapter=adapter))
    return finished(core)


def finished(core: EngineCore) -> list[int]:
    found: list[int] = []
    while core.has_work:
        for gain in core.step():
            found += gain.token_ids
        core.check_integrity()
    return found


def offered(core: EngineCore, adapter: str | None = None) -> int:
    told: list[int] = []
    core.offer(PROMPT, adapter, told.append)
    finished(core)
    [num_tokens] = told
    return num_tokens


def look(core: EngineCore) -> None:
    looked = threading.Event()
    core.look(looked.set)
    assert looked.wait(60)


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8"])
def test_a_prompt_that_is_handed_over_gives_the_same_tokens(model: Path, kv_dtype: str) -> None:
    cold = run(started(model, kv_dtype=kv_dtype, kv_shared=None))
    first, second = started(model, kv_dtype=kv_dtype), started(model, kv_dtype=kv_dtype)
    assert run(first) == cold
    assert offered(first) == 64
    look(second)
    assert second.num_found(PROMPT) == 64
    assert run(second) == cold
    assert second.scheduler.counters.cache_hits == second.scheduler.counters.fetched_disk_pages * 16 == 64
    for core in (first, second):
        core.close()


def test_an_adapters_prompt_is_found_by_the_same_adapter_alone(model: Path, tmp_path: Path) -> None:
    adapters = [random_adapter(tmp_path / name, savable_model(WIDE), seed=at) for at, name in enumerate("ab")]
    mine, others = (("mine", str(adapters[0])),), (("mine", str(adapters[1])),)
    first, same, other = (started(model, adapters=each) for each in (mine, mine, others))
    cold = run(first, adapter="mine")
    assert offered(first) == 0, "the base has not computed it"
    assert offered(first, adapter="mine") == 64
    for core in (same, other):
        look(core)
    assert (same.num_found(PROMPT, "mine"), same.num_found(PROMPT), other.num_found(PROMPT, "mine")) == (64, 0, 0)
    assert run(same, adapter="mine") == cold
    for core in (first, same, other):
        core.close()


def test_an_engine_that_stops_leaves_its_prefixes_to_those_that_run(model: Path) -> None:
    first, second = started(model), started(model)
    cold = run(first)
    first.close()
    look(second)
    assert run(second) == cold
    assert second.scheduler.counters.cache_hits == 64
    second.close()


def test_engines_with_other_settings_find_nothing(model: Path) -> None:
    first, second = started(model), started(model, kv_dtype="int8")
    run(first)
    assert offered(first) == 64
    look(second)
    assert second.num_found(PROMPT) == 0
    for core in (first, second):
        core.close()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_bundle_is_a_miss(model: Path, home: Path, damage: str) -> None:
    first, second = started(model), started(model)
    cold = run(first)
    assert offered(first) == 64
    look(second)
    [path] = (home / "shared").glob("*/*.pages")
    content = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case _:
            path.unlink()
    assert run(second) == cold
    assert second.scheduler.counters.cache_hits < 64
    for core in (first, second):
        core.close()


def test_a_directory_that_cannot_be_used_is_done_without(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    core = started(model, kv_shared=str(tmp_path / "file"))
    assert core.tiers is None
    assert "prefixes are not shared with other engines" in caplog.text
    core = started(model, kv_shared_size=100)
    assert core.tiers is None
    assert "kv_shared_size has no room for a page" in caplog.text
    assert offered(core) == 0
    look(core)
    with pytest.raises(BadRequest, match="kv_shared_size needs kv_shared"):
        started(model, kv_shared=None, kv_shared_size=1 << 30)


@pytest.mark.full
def test_engine_processes_hand_a_prompt_over(model: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    request = Request(id=1, prompt_ids=PROMPT, params=params, seed=0, shares_prompt=True)

    async def tokens(stream: Stream) -> list[int]:
        return [token async for batch in stream for each in batch for token in each.token_ids]

    async def hand_over() -> None:
        first, second = EngineHandle(config_of(model)), EngineHandle(config_of(model))
        for each in (first, second):
            each.start()
        try:
            await first.settled()
            await second.settled()
            assert await first.find_prefix(PROMPT) == 0
            stream = first.submit(request)
            cold = await tokens(stream)
            assert stream.offered is not None
            assert await stream.offered == 64
            assert await first.find_prefix(PROMPT) == 64
            assert await second.find_prefix(PROMPT, look=True) == 64
            assert await tokens(second.submit(request)) == cold
            await first.offer_all()
            answer = asyncio.create_task(second.find_prefix(PROMPT))
            await asyncio.sleep(0)
            second._kill()
            # It may have answered before.
            await asyncio.wait([answer], timeout=60)
            assert answer.done()
            assert answer.exception() is None or isinstance(answer.exception(), Unavailable)
        finally:
            for each in (first, second):
                await each.stop()

    asyncio.run(hand_over())

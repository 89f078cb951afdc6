"""Thousands of mixed requests, many of them given up half-way: nothing grows, and no page is lost."""

import asyncio
import gc
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_service import live_service, set_faults, until, until_idle

from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.models.service import ModelService

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

_WORKERS = 48
_WORDS = ("the", "engine", "stops", "a", "long", "request", "and", "nobody", "reads", "what", "it", "brought")


@dataclass(frozen=True)
class Holdings:
    """What two processes hold."""

    anonymous: tuple[int, int]
    files: tuple[int, int]
    threads: tuple[int, int]
    tasks: int

    @classmethod
    def of(cls, service: ModelService) -> "Holdings":
        gc.collect()
        pids = (os.getpid(), service.engine_pid or 0)
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        anonymous, threads = ([_field(text, name) for text in statuses] for name in ("RssAnon", "Threads"))
        files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        return cls(_pair(anonymous), _pair(files), _pair(threads), len(asyncio.all_tasks()))


def _pair(values: list[int]) -> tuple[int, int]:
    api, engine = values
    return api, engine


def _field(status: str, name: str) -> int:
    [line] = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * (1024 if line.endswith("kB") else 1)


async def random_request(service: ModelService, dice: random.Random) -> Request:
    text = " ".join(dice.choices(_WORDS, k=dice.choice((1, 5, 30, 600))))
    params = SamplingParams(
        max_tokens=dice.choice((0, 1, 8, 40, None)),
        n=dice.choice((1, 1, 1, 3)),
        stop=dice.choice(((), (), ("a", "the"))),
        logprobs=dice.choice((None, None, 0)),
        prompt_logprobs=dice.choice((None, None, None, 0)),
        bad_words=dice.choice(((), ("engine",))),
        seed=dice.choice((None, 7)),
    )
    salt = dice.choice(("", "a", "b"))
    if dice.random() < 0.3 and params.max_tokens != 0:
        chat = ChatRequest(messages=[{"role": "user", "content": text}], params=params, cache_salt=salt)
        return (await service.prepare_chat(chat)).request
    return await service.prepare(text, params, cache_salt=salt, priority=dice.choice((0, 0, 1)))


async def one_request(service: ModelService, dice: random.Random) -> None:
    if dice.random() < 0.05:
        with pytest.raises(BadRequest):
            await service.prepare([10**6], SamplingParams())
    request = await random_request(service, dice)
    patience = dice.choice((0.0, 0.001, 0.01, 0.05)) if request.params.max_tokens is None or dice.random() < 0.4 else 60
    task = asyncio.ensure_future(service.complete(request))
    await asyncio.wait([task], timeout=patience)
    if not task.done():
        task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    assert not isinstance(outcome, Exception), repr(outcome)


async def many_requests(service: ModelService, count: int, seed: int) -> None:
    numbers = iter(range(count))

    async def work(worker: int) -> None:
        dice = random.Random(seed * 1000 + worker)
        for _ in numbers:
            await one_request(service, dice)

    await asyncio.gather(*(work(worker) for worker in range(_WORKERS)))
    await until_idle(service)


async def until_prepared(service: ModelService) -> None:
    """An idle model loads what structured outputs need, and keeps a thread and a process of it."""
    await until(lambda: all(task.get_name() != "preparing" for task in asyncio.all_tasks()))
    await until(lambda: "llguidance" in Path(f"/proc/{service.engine_pid}/maps").read_text())


async def soak() -> None:
    async with live_service(EngineConfig(max_batch_seqs=32)) as service:
        pid = service.engine_pid
        await until_prepared(service)
        # Until the prefix cache is full and every token's text was asked for, growth is what was ordered.
        await many_requests(service, 1000, seed=1)
        before = Holdings.of(service)
        await many_requests(service, 2000, seed=2)
        after = Holdings.of(service)
        assert (service.engine_pid, service.restarts, service.num_requests) == (pid, 0, 0)
        assert after.files == before.files
        assert after.threads == before.threads
        assert after.tasks == before.tasks
        for earlier, later in zip(before.anonymous, after.anonymous, strict=True):
            # 0.1 MiB when it was written; a leak of 800 bytes a request is more.
            assert later - earlier < 3 << 19, f"grew by {(later - earlier) >> 10} KiB"


@pytest.mark.full
def test_mixed_requests_with_random_aborts_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: threads, files and memory of earlier tests came and went while they were counted."""
    set_faults(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    done = subprocess.run([sys.executable, __file__], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    asyncio.run(soak())

"""The API process's side of an engine: states, streams and restarts, with a real engine process that runs no model."""

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from live_service import set_faults, until
from told_time import ToldTime
from traces import read_spans

from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.engine.scheduler import Progress
from ostro.engine.sequence import FinishReason
from ostro.engine_process.handle import EngineHandle, Sleep, State, Stream
from ostro.errors import BadRequest, ModelError, ModelNotFound, ProfileFailed, TryLater, Unavailable
from ostro.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)


@asynccontextmanager
async def started(
    config: EngineConfig | None = None, *, load_stall_seconds: float = 600.0, sleep: Sleep = asyncio.sleep
) -> AsyncIterator[EngineHandle]:
    handle = EngineHandle(config or EngineConfig(), load_stall_seconds=load_stall_seconds, sleep=sleep)
    handle.start()
    try:
        yield handle
    finally:
        await handle.stop()


def request(id: int = 1, *, max_tokens: int | None = 4, n: int = 1, cache_salt: str = "") -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    return Request(id=id, prompt_ids=(1, 2, 3), params=params, seed=id, cache_salt=cache_salt)


async def read(stream: Stream) -> list[Progress]:
    return [progress async for batch in stream for progress in batch]


async def first(stream: Stream) -> list[Progress]:
    async for batch in stream:
        return batch
    return []


@asynccontextmanager
async def started_without_pauses() -> AsyncIterator[EngineHandle]:
    """Restarted at once; never taken for stuck, for to the watch, too, time flies."""

    async def pause(seconds: float) -> None:
        await asyncio.sleep(0.01)

    async with started(load_stall_seconds=math.inf, sleep=pause) as handle:
        yield handle


def test_stream_ends_when_every_choice_has_finished() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            steps = await read(handle.submit(request(n=3)))
            for choice in range(3):
                own = [step for step in steps if step.choice == choice]
                assert sum(len(step.token_ids) for step in own) == 4
                assert [step.finish_reason for step in own][-1] is FinishReason.LENGTH
            assert handle.num_streams == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_slow_reader_gets_everything_merged_and_the_engine_is_done_with_it() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            stream = handle.submit(request(max_tokens=500))
            await until(lambda: handle.num_streams == 0)
            [step] = await first(stream)
            assert len(step.token_ids) == 500
            assert step.finish_reason is FinishReason.LENGTH
            stream.close()

    asyncio.run(scenario())


def test_choice_that_was_finished_early_brings_nothing_more() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            stream = handle.submit(request(max_tokens=None, n=2))
            await first(stream)
            stream.finish_choice(0)
            stream.finish_choice(0)
            assert {step.choice for step in await first(stream)} == {1}
            stream.finish_choice(1)
            assert await read(stream) == []
            assert handle.num_streams == 0
            await until(lambda: handle.heartbeat.counters.steps > 0 and handle.heartbeat.running == 0)

    asyncio.run(scenario())


@pytest.mark.full
def test_request_that_cannot_be_sent_fails_alone() -> None:
    """A lone surrogate is text in Python and none in UTF-8."""

    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            with pytest.raises(BadRequest, match="cannot be passed on"):
                handle.submit(request(1, cache_salt="\ud800"))
            assert handle.num_streams == 0
            assert len(await read(handle.submit(request(2)))) > 0

    asyncio.run(scenario())


@pytest.mark.full
def test_request_that_the_engine_refuses_fails_alone() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            bad, good = handle.submit(request(1, max_tokens=10**6)), handle.submit(request(2))
            with pytest.raises(BadRequest, match="maximum context length"):
                await read(bad)
            assert sum(len(step.token_ids) for step in await read(good)) == 4
            assert handle.num_streams == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_nothing_can_be_submitted_before_the_engine_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "load_seconds=0.3")

    async def scenario() -> None:
        async with started() as handle:
            with pytest.raises(Unavailable, match="loading"):
                handle.submit(request())
            handle.abort(1)
            await handle.settled()
            assert handle.state is State.READY
            await read(handle.submit(request()))

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.5])
def test_stopping_while_it_loads_is_quick_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    set_faults(monkeypatch, "load_seconds=60")

    async def scenario() -> None:
        async with started() as handle:
            settling = asyncio.create_task(handle.settled())
            await asyncio.sleep(delay)
            began = time.monotonic()
            await handle.stop()
            assert time.monotonic() - began < 30
            with pytest.raises(Unavailable, match="stopped"):
                await settling
            assert handle.pid is None or not os.path.exists(f"/proc/{handle.pid}")

    asyncio.run(scenario())


def test_waiters_for_a_models_files_hear_of_the_failure() -> None:
    async def scenario() -> None:
        async with started() as handle:
            locating = asyncio.create_task(handle.located())
            await asyncio.sleep(0)
            await handle.stop()
            with pytest.raises(Unavailable, match="stopped"):
                await locating

    asyncio.run(scenario())


@pytest.mark.full
def test_stopping_in_the_pause_before_a_restart_does_not_wait_for_it() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            assert handle.pid is not None
            os.kill(handle.pid, signal.SIGKILL)
            await until(lambda: handle.state is State.LOADING)
            await handle.stop()
            assert handle.restarts == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_stopping_twice_is_harmless_and_streams_end() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            stream = handle.submit(request(max_tokens=None))
            await asyncio.gather(handle.stop(), handle.stop())
            with pytest.raises(Unavailable, match="stopped"):
                await read(stream)
            stream.close()
            assert handle.num_streams == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_orderly_stop_lets_the_engine_end_by_itself() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            await handle.stop()
            assert handle._status() == 0

    asyncio.run(scenario())


def test_request_submitted_right_after_the_engine_died_fails_too() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            assert handle.pid is not None
            os.kill(handle.pid, signal.SIGKILL)
            # The handle has not heard of it yet.
            stream = handle.submit(request())
            with pytest.raises(Unavailable, match="A new one starts"):
                await asyncio.wait_for(read(stream), 5)
            with pytest.raises(Unavailable):
                handle.submit(request(2))
            stream.close()
            assert handle.num_streams == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_output_before_the_engine_died_is_read_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.01")

    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            assert handle.pid is not None
            unread = handle.submit(request(1, max_tokens=None))
            # In the same steps as the first, and read: what has arrived of one has arrived of the other.
            companion = handle.submit(request(2, max_tokens=None))
            seen = 0
            while seen <= 5:
                seen += sum(len(step.token_ids) for step in await first(companion))
            os.kill(handle.pid, signal.SIGKILL)
            await until(lambda: handle.state is State.LOADING)
            reader = aiter(unread)
            [step] = await anext(reader)
            assert len(step.token_ids) >= seen
            with pytest.raises(Unavailable):
                await anext(reader)
            unread.close()
            companion.close()

    asyncio.run(scenario())


@pytest.mark.full
def test_settled_waits_for_the_new_engine_after_a_death() -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            before = handle.pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            await until(lambda: handle.state is State.LOADING)
            await asyncio.wait_for(handle.settled(), 10)
            assert handle.restarts == 1
            assert handle.pid != before
            await read(handle.submit(request()))

    asyncio.run(scenario())


def test_model_that_cannot_be_loaded_fails_once_with_the_reason() -> None:
    time = ToldTime()

    async def scenario() -> None:
        async with started(EngineConfig(model="./no/such/model"), sleep=time.sleep) as handle:
            for _ in range(2):
                with pytest.raises(ModelNotFound, match="There is no file or directory"):
                    await handle.settled()
            with pytest.raises(ModelNotFound):
                handle.submit(request())
            await until(lambda: not os.path.exists(f"/proc/{handle.pid}"))
            await time.let_pass(60)
            assert handle.state is State.FAILED
            assert handle.restarts == 0

    asyncio.run(scenario())


@pytest.mark.full
def test_engine_that_dies_again_and_again_while_loading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "crash_loading")

    async def scenario() -> None:
        async with started_without_pauses() as handle:
            with pytest.raises(ModelError, match=r"died 3 times while it loaded the model \(exit status 70\)"):
                await handle.settled()
            assert handle.state is State.FAILED

    asyncio.run(scenario())


@pytest.mark.full
def test_engine_that_follows_another_is_restarted_as_often_as_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as an engine that dies while it loads, and was given up after three times."""
    set_faults(monkeypatch, "follow=0")

    async def scenario() -> None:
        async with started_without_pauses() as handle:
            await until(lambda: handle.restarts >= 4)
            assert (handle.state, handle.failure) == (State.LOADING, None)
            # Its leader is no longer there when it comes back: that may take any time too.
            set_faults(monkeypatch, "crash_loading")
            before = handle.restarts
            await until(lambda: handle.restarts >= before + 3)
            assert (handle.state, handle.failure) == (State.LOADING, None)

    asyncio.run(scenario())


def test_engine_that_follows_another_is_not_stuck_and_says_who_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "follow=60")
    time = ToldTime()

    async def scenario() -> None:
        handle = EngineHandle(EngineConfig(), load_stall_seconds=1.0, sleep=time.sleep)
        assert handle.refusal is None
        handle.start()
        try:
            await until(lambda: handle.refusal is not None)
            await time.let_pass(60)
            assert (handle.state, handle.restarts) == (State.LOADING, 0)
            assert "This host only helps another one" in str(handle.refusal)
        finally:
            await handle.stop()
        assert handle.refusal is None

    asyncio.run(scenario())


@pytest.mark.full
def test_one_profile_at_a_time_and_one_left_early_makes_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started() as handle:
            await handle.settled()
            paths = [str(tmp_path / name) for name in ("left", "second")]
            first = asyncio.create_task(handle.profile(paths[0], seconds=60, max_steps=1000))
            await asyncio.sleep(0)
            with pytest.raises(TryLater, match="already"):
                await handle.profile(paths[1], seconds=60, max_steps=1000)
            first.cancel()
            await until((tmp_path / "left").exists)
            second = await handle.profile(paths[1], seconds=0.01, max_steps=1000)
            assert (second.path, second.steps) == (paths[1], 0)
            assert read_spans(tmp_path / "second") == []

    asyncio.run(scenario())


@pytest.mark.full
def test_engine_that_writes_a_profile_is_not_stuck_unless_it_takes_as_long_as_loading_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long trace on a slow disk had the engine killed, and all requests with it."""
    set_faults(monkeypatch, "step_seconds=0.01")
    part = tmp_path / ".trace"
    # Whoever writes into it waits for a reader.
    os.mkfifo(part)
    time = ToldTime()

    async def scenario() -> None:
        async with started(sleep=time.sleep) as handle:
            await handle.settled()
            stream = handle.submit(request(max_tokens=None))
            writing = asyncio.create_task(handle.profile(str(tmp_path / "trace"), seconds=60, max_steps=2))
            await until(lambda: handle.heartbeat.writing)
            await time.let_pass(2 * handle.stall_seconds)
            await asyncio.to_thread(part.read_bytes)
            assert (await writing).steps == 2
            assert len(await first(stream)) > 0
            assert handle.restarts == 0

            os.mkfifo(tmp_path / ".again")
            writing = asyncio.create_task(handle.profile(str(tmp_path / "again"), seconds=60, max_steps=2))
            await until(lambda: handle.heartbeat.writing)
            await time.let_pass(2 * handle.load_stall_seconds)
            with pytest.raises(Unavailable, match="no progress for 600 s"):
                await writing
            stream.close()

    asyncio.run(scenario())


@pytest.mark.full
def test_profile_fails_with_its_engine_and_where_there_is_no_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started() as handle:
            with pytest.raises(Unavailable):
                await handle.profile(str(tmp_path / "early"), seconds=60, max_steps=1000)
            await handle.settled()
            with pytest.raises(ProfileFailed, match="cannot be written"):
                await handle.profile(str(tmp_path / "nowhere" / "a"), seconds=0.01, max_steps=1000)
            profile = asyncio.create_task(handle.profile(str(tmp_path / "late"), seconds=60, max_steps=1000))
            await asyncio.sleep(0)
            assert handle.pid is not None
            os.kill(handle.pid, signal.SIGKILL)
            with pytest.raises(Unavailable):
                await profile

    asyncio.run(scenario())

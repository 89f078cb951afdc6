"""`LLM.agenerate` and `LLM.astream`: the engine steps in a thread, and many callers share it in one event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from model_directory import write_model

from ostro import LLM, Delta, EngineConfig, SamplingParams
from ostro.engine.request import Request
from ostro.errors import ContextLengthExceeded

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
PROMPTS = ["the fox", "dog", "the lazy dog does not mind the quick brown fox", "the quick brown"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(directory: Path) -> LLM:
    return LLM(directory, EngineConfig(page_size=4, max_batch_tokens=32))


def assert_idle(llm: LLM) -> None:
    """The worker thread ends once nobody awaits; what was aborted is gone by then."""
    for thread in threading.enumerate():
        if thread.name == "ostro-engine":
            thread.join(30)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.usage.in_use == 0
    assert not llm.core.has_work


@contextmanager
def before_each_step(llm: LLM, action: Callable[[], None]) -> Iterator[None]:
    """Runs an action in the thread that steps, before the step."""
    step = llm.core.step

    def stepping() -> object:
        action()
        return step()

    llm.core.step = stepping  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del llm.core.step


async def text_of(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    return "".join([delta.text async for delta in llm.astream(prompt, params)])


def test_callers_at_once_get_the_tokens_of_generate_from_shared_steps(llm: LLM) -> None:
    seeded = [GREEDY.with_changes(temperature=1.0, seed=seed) for seed in range(len(PROMPTS))]
    expected = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, seeded, strict=True)]
    steps = llm.core.scheduler.counters.steps

    async def main() -> list[list[int]]:
        calls = [llm.agenerate(prompt, params) for prompt, params in zip(PROMPTS, seeded, strict=True)]
        return [completion.choices[0].token_ids for [completion] in await asyncio.gather(*calls)]

    check, num_prepared = llm.core.check, threading.Semaphore(0)

    def check_and_count(request: Request) -> None:
        check(request)
        num_prepared.release()

    def wait_for_the_last_caller() -> None:
        while waiting:
            assert num_prepared.acquire(timeout=30)
            waiting.pop()

    waiting = list(PROMPTS)
    llm.core.check = check_and_count  # type: ignore[method-assign]
    with before_each_step(llm, wait_for_the_last_caller):
        found = asyncio.run(main())
    del llm.core.check
    assert found == [completion.choices[0].token_ids for completion in expected]
    # One after the other they would take a step a token.
    assert llm.core.scheduler.counters.steps - steps < len(PROMPTS) * 12
    assert_idle(llm)


def test_agenerate_answers_a_batch_in_order(llm: LLM) -> None:
    params = [GREEDY.with_changes(max_tokens=n) for n in (9, 2, 5, 1)]
    expected = llm.generate(PROMPTS, params)
    found = asyncio.run(llm.agenerate(PROMPTS, params))
    assert [each.choices[0].token_ids for each in found] == [each.choices[0].token_ids for each in expected]
    assert [each.text for each in found] == [each.text for each in expected]


def test_streams_at_once_each_bring_their_own_text(llm: LLM) -> None:
    expected = [completion.text for completion in llm.generate(PROMPTS, GREEDY)]

    async def main() -> list[str]:
        return await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS))

    assert asyncio.run(main()) == expected
    assert_idle(llm)


def test_all_choices_of_a_stream_arrive_though_the_reader_is_slower_than_the_engine(llm: LLM) -> None:
    """A completion may be finished while pieces of it are still in the inbox."""
    params = GREEDY.with_changes(n=3, temperature=1.0, seed=3)
    expected = [choice.token_ids for choice in llm.generate("the fox", params)[0].choices]

    async def main() -> list[Delta]:
        deltas: list[Delta] = []
        async for delta in llm.astream("the fox", params):
            if not deltas:
                await until(lambda: not llm.core.scheduler.has_work)
            deltas.append(delta)
        return deltas

    deltas = asyncio.run(main())
    for index, ids in enumerate(expected):
        assert [id for delta in deltas if delta.index == index for id in delta.token_ids] == ids
    assert_idle(llm)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.001)


def test_the_event_loop_runs_on_during_a_step(llm: LLM) -> None:
    began, go = threading.Event(), threading.Event()

    def wait_for_the_loop() -> None:
        began.set()
        assert go.wait(30), "the event loop was held up by the step"

    async def main() -> None:
        with before_each_step(llm, wait_for_the_loop):
            call = asyncio.create_task(llm.agenerate("the fox", GREEDY))
            await until(began.is_set)
            go.set()
            await call

    asyncio.run(main())


def test_a_cancelled_call_frees_its_pages_and_leaves_the_others_alone(llm: LLM) -> None:
    expected = llm.generate("the lazy dog", GREEDY)[0].text

    async def main() -> str:
        ended = asyncio.create_task(llm.agenerate(["the fox", "dog"], ENDLESS))
        stays = asyncio.create_task(text_of(llm, "the lazy dog"))
        await until(lambda: llm.core.scheduler.kv.usage.in_use > 0)
        ended.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended
        return await stays

    assert asyncio.run(main()) == expected
    assert_idle(llm)
    assert llm.core.scheduler.counters.generated_tokens < 2 * 200


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    async def main() -> None:
        async with aclosing(llm.astream("the fox", ENDLESS)) as deltas:
            async for _ in deltas:
                break

    asyncio.run(main())
    assert_idle(llm)
    assert llm.core.scheduler.counters.generated_tokens < 200


def test_a_loop_that_is_closed_under_its_callers_leaves_nothing_running(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    deltas = llm.astream("the fox", ENDLESS)
    closed = threading.Event()
    gate = iter([lambda: None])

    def hold_back() -> None:
        # The first step goes through; the others wait until the loop is gone.
        next(gate, lambda: closed.wait(30))()

    with before_each_step(llm, hold_back):
        loop.run_until_complete(anext(deltas))
        loop.close()
        closed.set()
        assert_idle(llm)
    assert llm.core.scheduler.counters.generated_tokens < 200


def test_a_request_that_cannot_run_fails_its_own_caller_alone(llm: LLM) -> None:
    expected = llm.generate("the fox", GREEDY)[0].text

    async def main() -> list[object]:
        calls = (text_of(llm, "the fox"), llm.agenerate([[1] * 300], GREEDY))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    text, error = asyncio.run(main())
    assert text == expected
    assert isinstance(error, ContextLengthExceeded)
    assert_idle(llm)


def test_a_step_that_fails_fails_all_callers_and_the_next_call_works(llm: LLM) -> None:
    before = llm.generate("the fox", GREEDY)[0].text

    def broken() -> None:
        raise RuntimeError("the device is gone")

    async def main() -> list[object]:
        calls = (text_of(llm, "the fox"), llm.agenerate("dog", GREEDY))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with before_each_step(llm, broken):
        failures = asyncio.run(main())
    assert [str(failure) for failure in failures] == ["the device is gone"] * 2
    assert_idle(llm)
    assert asyncio.run(text_of(llm, "the fox")) == before


def test_a_blocking_call_beside_awaited_ones_gets_its_own_tokens(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].text for prompt in ("the fox", "the lazy dog")]

    async def main() -> list[str]:
        stream = llm.astream("the fox", GREEDY)
        first = await anext(stream)
        blocking = llm.generate("the lazy dog", GREEDY)[0].text
        rest = [delta.text async for delta in stream]
        return [first.text + "".join(rest), blocking]

    assert asyncio.run(main()) == expected
    assert_idle(llm)


def test_threads_at_once_each_get_their_own_tokens(llm: LLM) -> None:
    expected = [completion.text for completion in llm.generate(PROMPTS, GREEDY)]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = threads.map(lambda prompt: llm.generate(prompt, GREEDY)[0].text, PROMPTS * 3)
        assert list(found) == expected * 3
    assert_idle(llm)


def test_one_model_serves_one_event_loop_after_another(llm: LLM) -> None:
    assert asyncio.run(text_of(llm, "the fox")) == asyncio.run(text_of(llm, "the fox"))
    assert_idle(llm)

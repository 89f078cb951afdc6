"""Constraints in a real engine process: compiled beside its steps, with the default model's own vocabulary."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import pytest
from live_service import set_faults, until

from ostro.config import EngineConfig
from ostro.engine.constraint import Constraint
from ostro.engine.request import Request
from ostro.engine.scheduler import Progress
from ostro.engine.sequence import FinishReason
from ostro.engine_process.handle import EngineHandle, Stream
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.text.model_tokenizer import load_tokenizer
from ostro.text.tokenizer import Tokenizer
from ostro.weights import open_checkpoint

YES_OR_NO = Constraint(grammar='start: "yes, certainly" | "no, never"')
JUMPING = Constraint(grammar='start: ("a" | "b") "; and then the same again"', jump_forward=True)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(EngineConfig(), open_checkpoint(None))


@asynccontextmanager
async def ready() -> AsyncIterator[EngineHandle]:
    handle = EngineHandle(EngineConfig())
    handle.start()
    try:
        await handle.settled()
        yield handle
    finally:
        await handle.stop()


def constrained(id: int, constraint: Constraint | None, *, n: int = 1, max_tokens: int | None = 60) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0, ignore_eos=constraint is None)
    eos_ids = tokenizer().eos_ids
    return Request(id=id, prompt_ids=(1, 2, 3), params=params, seed=id, eos_ids=eos_ids, constraint=constraint)


async def texts(stream: Stream) -> list[str]:
    found: dict[int, list[Progress]] = {}
    async for batch in stream:
        for step in batch:
            found.setdefault(step.choice, []).append(step)
    assert all(steps[-1].finish_reason is FinishReason.STOP for steps in found.values())
    return [tokenizer().decode([t for step in steps for t in step.token_ids]) for _, steps in sorted(found.items())]


@pytest.mark.full
def test_choices_follow_their_grammars_and_forced_tokens_are_counted() -> None:
    async def scenario() -> None:
        async with ready() as handle:
            assert set(await texts(handle.submit(constrained(1, YES_OR_NO, n=8)))) == {"yes, certainly", "no, never"}
            assert handle.heartbeat.counters.forced_tokens == 0
            for text in await texts(handle.submit(constrained(2, JUMPING, n=3))):
                assert text in ("a; and then the same again", "b; and then the same again")
            await until(lambda: handle.heartbeat.counters.forced_tokens > 10)

    asyncio.run(scenario())


@pytest.mark.full
def test_a_grammar_that_does_not_compile_fails_alone_while_others_go_on() -> None:
    async def scenario() -> None:
        async with ready() as handle:
            neighbour = handle.submit(constrained(1, None, max_tokens=400))
            refused = handle.submit(constrained(2, Constraint(grammar="start: nothing_such")))
            with pytest.raises(BadRequest) as refusal:
                await texts(refused)
            assert refusal.value.param == "structured"
            steps = [step async for batch in neighbour for step in batch]
            assert sum(len(step.token_ids) for step in steps) == 400
            assert len(await texts(handle.submit(constrained(3, YES_OR_NO)))) == 1

    asyncio.run(scenario())


@pytest.mark.full
def test_a_request_that_is_aborted_while_it_is_compiled_never_runs() -> None:
    async def scenario() -> None:
        async with ready() as handle:
            # The first one waits for the vocabulary.
            handle.submit(constrained(1, YES_OR_NO)).close()
            stream = handle.submit(constrained(2, YES_OR_NO, n=3))
            stream.finish_choice(1)
            assert len(await texts(stream)) == 2
            await until(lambda: handle.heartbeat.counters.generated_tokens > 0 and handle.heartbeat.running == 0)
            assert handle.num_streams == 0

    asyncio.run(scenario())


def test_what_contradicts_a_structure_is_refused_before_it_is_compiled() -> None:
    async def scenario() -> None:
        async with ready() as handle:
            params = SamplingParams(max_tokens=4, min_tokens=2)
            request = Request(id=1, prompt_ids=(1,), params=params, seed=1, constraint=YES_OR_NO)
            with pytest.raises(BadRequest) as refusal:
                await texts(handle.submit(request))
            assert refusal.value.param == "min_tokens"

    asyncio.run(scenario())

"""Nothing is compiled once a runner is ready, whatever is asked of it: any traffic, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_models import FAMILIES, ROWS, compilations, jax_runner
from native_models import savable_model
from peft_directory import OF_ANY, random_adapter
from scripted_grammar import ScriptedGrammars, scripted

from ostro.backends.jax.runner import JaxRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.scheduler import Limits
from ostro.sampling_params import SamplingParams
from ostro.weights import Pooling
from ostro.weights.adapter import read_adapter

VOCAB = 300
CONFIG = {**FAMILIES["llama"], "max_position_embeddings": 200}
ADAPTERS = ("a", "b")
# Few pages, so that sequences are preempted.
PAGES, BUDGET = 36, 64
STEMS = [tuple(np.random.default_rng(seed).integers(0, VOCAB, 60).tolist()) for seed in range(3)]
"""Beginnings of prompts, so that they share prefixes."""
MASKED = scripted({0: dict.fromkeys(range(0, VOCAB, 7), 1), 1: dict.fromkeys(range(1, VOCAB, 5), 0)})


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    params: SamplingParams
    task: Task = Task.GENERATE
    masked: bool = False
    adapter: str | None = None


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Abort:
    """Aborts one of the requests that have arrived."""

    number: int
    choice: int | None


Event = Arrival | Steps | Abort


def tokens() -> st.SearchStrategy[int]:
    return st.integers(0, VOCAB - 1)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, 60))]
    return (*stem, *draw(st.lists(tokens(), min_size=1, max_size=20)))


@st.composite
def generation(draw: st.DrawFn) -> SamplingParams:
    """Any mixture: each setting is neutral about as often as not."""
    some: dict[str, st.SearchStrategy[Any]] = {
        "n": st.sampled_from([2, 3, 2 * ROWS + 1]),
        "temperature": st.floats(0.1, 2.0),
        "top_k": st.integers(1, VOCAB + 50),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.01, 0.5),
        "top_n_sigma": st.floats(0.5, 3.0),
        "repetition_penalty": st.floats(0.8, 1.5),
        "presence_penalty": st.floats(-1.0, 1.0),
        "frequency_penalty": st.floats(-1.0, 1.0),
        "logit_bias": st.dictionaries(tokens(), st.floats(-100, 100), max_size=4),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 5),
        "stop_token_ids": st.lists(tokens(), max_size=3).map(tuple),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(some)), max_size=5))
    given: dict[str, Any] = {"temperature": 0, **{name: draw(some[name]) for name in sorted(chosen)}}
    return SamplingParams(max_tokens=draw(st.integers(1, 12)), **given)


def traffic(*adapters: str) -> st.SearchStrategy[list[Event]]:
    adapter = st.sampled_from([None, *adapters])
    embedding, scoring = SamplingParams(max_tokens=0), SamplingParams(max_tokens=0, prompt_logprobs=1)
    arrivals = st.one_of(
        st.builds(Arrival, prompts(), generation(), masked=st.booleans(), adapter=adapter),
        st.builds(Arrival, prompts(), st.just(embedding), st.just(Task.EMBED), adapter=adapter),
        st.builds(Arrival, prompts(), st.just(scoring), adapter=adapter),
    )
    steps = st.builds(Steps, st.integers(1, 8))
    aborts = st.builds(Abort, st.integers(0, 10), st.none() | st.integers(0, 3))
    return st.lists(st.one_of(arrivals, arrivals, steps, aborts), min_size=1, max_size=16)


@pytest.fixture(scope="module")
def runner() -> JaxRunner:
    return make_runner()


@pytest.fixture(scope="module")
def runner_with_adapters(tmp_path_factory: pytest.TempPathFactory) -> JaxRunner:
    model, directory = savable_model(CONFIG), tmp_path_factory.mktemp("adapters")
    made = {
        name: random_adapter(directory / name, model, rank=rank, seed=rank, targets=OF_ANY)
        for rank, name in enumerate(ADAPTERS, 3)
    }
    return make_runner(adapters={name: read_adapter(path) for name, path in made.items()})


def make_runner(**options: Any) -> JaxRunner:
    pooling = Pooling("mean", normalize=True)
    runner = jax_runner(CONFIG, savable_model(CONFIG), tp=2, pages=PAGES, budget=BUDGET, pooling=pooling, **options)
    # What other tests have compiled would hide what this runner compiles.
    jax.clear_caches()
    return runner


def run(runner: JaxRunner, events: Sequence[Event]) -> EngineCore:
    limits = Limits(max_batch_tokens=BUDGET, max_batch_seqs=ROWS)
    core, num_arrived = EngineCore(runner, limits, adapters=ADAPTERS), 0
    for event in events:
        match event:
            case Arrival():
                add(core, num_arrived, event)
                num_arrived += 1
            case Steps(count=count):
                for _ in range(count):
                    core.step()
            case Abort(number=number, choice=choice) if num_arrived:
                core.abort(number % num_arrived, choice)
    while core.has_work:
        assert all(each.error is None for each in core.step())
    core.check_integrity()
    return core


def add(core: EngineCore, id: int, arrival: Arrival) -> None:
    constraint = MASKED if arrival.masked else None
    request = Request(
        id=id,
        prompt_ids=arrival.prompt,
        params=arrival.params,
        seed=id,
        task=arrival.task,
        prompt_logprobs_from=None if arrival.params.prompt_logprobs is None else 1,
        constraint=constraint,
        adapter=arrival.adapter,
    )
    core.add(request, None if constraint is None else ScriptedGrammars(VOCAB).prepare(constraint))


def check_that_nothing_is_compiled(runner: JaxRunner, events: Sequence[Event]) -> None:
    with compilations() as made:
        core = run(runner, events)
    assert made == []
    assert core.scheduler.counters.recompiles == 0


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(traffic())
def test_nothing_is_compiled_for_any_traffic(runner: JaxRunner, events: list[Event]) -> None:
    check_that_nothing_is_compiled(runner, events)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(traffic())
def test_nothing_is_compiled_for_much_more_traffic(runner: JaxRunner, events: list[Event]) -> None:
    check_that_nothing_is_compiled(runner, events)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(traffic(*ADAPTERS))
def test_nothing_is_compiled_for_traffic_with_adapters(runner_with_adapters: JaxRunner, events: list[Event]) -> None:
    check_that_nothing_is_compiled(runner_with_adapters, events)


@pytest.mark.full
def test_nothing_is_compiled_for_all_kinds_of_requests_at_a_time(runner: JaxRunner) -> None:
    """With preemption, which hypothesis might not bring about."""
    every = SamplingParams(
        max_tokens=12,
        n=3,
        temperature=1.0,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        top_n_sigma=2.0,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=2,
        logit_bias={5: 3.0},
        prompt_logprobs=1,
    )
    plain = SamplingParams(max_tokens=30, temperature=0)
    kinds = [Arrival(stem[:40], params) for stem in STEMS for params in (every, plain)]
    embedding = Arrival(STEMS[0], SamplingParams(max_tokens=0), Task.EMBED)
    masked = Arrival(STEMS[1], every, masked=True)
    events: list[Event] = [*kinds, embedding, Steps(5), masked, Steps(3), Abort(1, None), *kinds]
    with compilations() as made:
        counters = run(runner, events).scheduler.counters
    assert made == []
    assert counters.preemptions > 0
    assert counters.cache_hits > 0


def test_compilations_are_noticed() -> None:
    with compilations() as made:
        jax.jit(lambda x: x * 3 + 1)(np.arange(17))
    assert made

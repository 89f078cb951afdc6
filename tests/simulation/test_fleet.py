"""The fleet: the real engine on a clock. Every request ends once, and batches are those of a real engine."""

from typing import get_args

import msgspec
import pytest
from simulated import at_rate, by_clients, cost_table, load, simulated

from ostro.backends.fake import FakeRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.measure.bench.jobs import Level
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.workload import Item, Span
from ostro.sampling_params import SamplingParams
from ostro.simulation.costs import CostTable, Work, step_seconds
from ostro.simulation.fleet import Fleet
from ostro.simulation.prompts import Prompt, PromptTokens
from ostro.simulation.routing import Routing, chooser

# Prompts that share a prefix, so many at once that pages run out.
_ARRIVALS = [(0.013 * number, number % 3, 5 + 7 * number % 31, 1 + 5 * number % 23) for number in range(40)]


def _fleet(table: CostTable, replicas: int = 1, routing: Routing = "prefix") -> Fleet:
    return Fleet(table, table.endpoint("completions"), replicas=replicas, routing=routing)


def _prompt(family: int, length: int, number: int) -> Prompt:
    return Prompt((*range(family * 100, family * 100 + length), 900 + number), length + 1)


def _arrivals_when_simulated(table: CostTable) -> dict[int, list[float]]:
    fleet, found = _fleet(table), dict[int, list[float]]()

    def note(outcome: Outcome) -> None:
        found[outcome.index] = [outcome.start + each for each in outcome.arrivals]

    for number, (at, family, length, tokens) in enumerate(_ARRIVALS):
        prompt = _prompt(family, length, number)
        fleet.at(at, lambda n=number, p=prompt, t=tokens: fleet.send(n, p, t, note))  # type: ignore[misc]
    fleet.run()
    return found


def _arrivals_of_an_engine(table: CostTable) -> tuple[dict[int, list[float]], EngineCore]:
    """The same requests at the same times, on an engine whose runner keeps pages, driven as an engine process does."""
    seconds, shape = step_seconds(table), table.engine
    works: list[Work] = []

    class Recording(FakeRunner):
        def launch(self, batch):  # type: ignore[no-untyped-def]
            works.append(Work.of(batch))
            return super().launch(batch)

    core = EngineCore(
        Recording(
            page_size=shape.page_size,
            num_pages=shape.num_pages,
            max_batch_tokens=shape.max_batch_tokens,
            max_batch_seqs=shape.max_batch_seqs,
        )
    )
    coming, now = list(enumerate(_ARRIVALS)), 0.0
    found: dict[int, list[float]] = {number: [] for number, _ in coming}
    while coming or core.has_work:
        while coming and (coming[0][1][0] <= now or not core.has_work):
            number, (at, family, length, tokens) = coming.pop(0)
            now = max(now, at)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            core.add(Request(id=number, prompt_ids=_prompt(family, length, number).token_ids, params=params, seed=0))
        progress = core.step()
        now += seconds(works[-1])
        for gain in progress:
            found[gain.request_id] += [now] * len(gain.token_ids)
    return found, core


@pytest.mark.parametrize("num_pages", [256, 24])
def test_every_token_comes_when_it_does_on_a_real_engine(num_pages: int) -> None:
    table = cost_table(num_pages=num_pages)
    expected, core = _arrivals_of_an_engine(table)
    found = _arrivals_when_simulated(table)
    assert found.keys() == expected.keys()
    assert all(found[number] == pytest.approx(times) for number, times in expected.items())
    assert core.scheduler.counters.cache_hits > 0
    assert (core.scheduler.counters.preemptions > 0) == (num_pages == 24)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("routing", get_args(Routing))
def test_each_request_ends_once_and_tokens_add_up(routing: Routing, steps_ahead: int) -> None:
    table = cost_table(num_pages=24, steps_ahead=steps_ahead)
    fleet, workload = _fleet(table, 2, routing), load(shared_prefix=8)
    tokens, asked = PromptTokens(table.endpoint("completions"), 1000), 0
    ended: list[Outcome] = []
    for index in range(120):
        prompt, output_len = workload.prompt(index)
        asked += output_len
        fleet.at(index * 0.002, lambda i=index, p=prompt, n=output_len: fleet.send(i, tokens.of(p), n, ended.append))  # type: ignore[misc]
    fleet.run()
    assert sorted(each.index for each in ended) == list(range(120))
    assert all(each.output_tokens == each.max_tokens == len(each.arrivals) for each in ended)
    assert all(each.arrivals == sorted(each.arrivals) and each.e2e == each.arrivals[-1] for each in ended)
    assert fleet.counters.generated_tokens == asked
    assert fleet.counters.preemptions > 0
    for replica in fleet.replicas:
        replica.core.check_integrity()
        assert replica.core.scheduler.kv.usage.in_use == 0
        assert not replica.has_work


def test_the_same_load_gives_the_same_run() -> None:
    first, second = (simulated(at_rate(300, 100), replicas=4).bench.levels[0].outcomes for _ in range(2))
    assert first == second


def test_times_are_those_of_the_table() -> None:
    table = cost_table(request=0.5, event=0.002)
    [outcome] = simulated(by_clients(1, 1), table, load(inputs=Span(8, 8), outputs=Span(3, 3))).bench.levels[0].outcomes
    # A prompt of 8 takes 18 ms, a row 1 ms, and each token 2 ms on its way.
    assert outcome.ttft == pytest.approx(0.5 + 0.018 + 0.002)
    assert outcome.gaps == pytest.approx([0.003, 0.003])


def test_requests_of_a_burst_reach_the_engine_one_after_the_other() -> None:
    table = cost_table(request=0.010, max_batch_tokens=64)
    workload = load(inputs=Span(8, 8), outputs=Span(1, 1), vocab_size=1000)
    found = simulated(by_clients(3, 3), table, workload).bench.levels[0].outcomes
    # The first runs alone, for 18 ms from 10 ms on; those that come at 20 and 30 ms run in the steps after it.
    assert [each.ttft for each in found] == pytest.approx([0.028, 0.028 + 0.018, 0.046 + 0.018])


def test_steps_take_longer_while_the_api_process_is_busy_beside_them() -> None:
    table = msgspec.structs.replace(cost_table(request=0.010, max_batch_tokens=64), contention=0.5)
    workload = load(inputs=Span(8, 8), outputs=Span(1, 1), vocab_size=1000)
    found = simulated(by_clients(3, 3), table, workload).bench.levels[0].outcomes
    # The first step takes 18 ms from 10 ms on, beside which the others are passed on until 30 ms: 27 ms. They have
    # arrived when it ends, and run in a step that has nothing beside it.
    assert [each.ttft for each in found] == pytest.approx([0.037, 0.037 + 0.026, 0.037 + 0.026])


def test_a_step_that_is_launched_ahead_waits_for_the_device() -> None:
    """The second step is launched at once and ends after the first: the host costs nothing in between."""
    workload = load(inputs=Span(8, 8), outputs=Span(3, 3))
    ahead, behind = (
        simulated(by_clients(1, 1), cost_table(steps_ahead=steps), workload).bench.levels[0].outcomes
        for steps in (1, 0)
    )
    assert ahead[0].arrivals == pytest.approx(behind[0].arrivals)


def test_a_request_that_can_never_run_fails_alone() -> None:
    workload = load(inputs=Span(200, 300), outputs=Span(4, 4))
    found = simulated(at_rate(100, 40), workload=workload).bench.levels[0]
    assert 0 < found.figures.failed < 40
    assert found.figures.errors == {"HTTP 400": found.figures.failed}
    assert all(each.detail for each in found.outcomes if each.error)


def test_least_loaded_leaves_a_busy_replica_alone() -> None:
    choosing, prompt = chooser("least-loaded", 3, lambda: 0.0), Prompt((1,), 1)
    assert sorted(choosing.choose(prompt) for _ in range(3)) == [0, 1, 2]
    choosing.ended(1)
    assert choosing.choose(prompt) == 1
    choosing.ended(2)
    choosing.ended(0)
    assert sorted(choosing.choose(prompt) for _ in range(2)) == [0, 2]


def test_turns_find_their_conversation_only_by_prefix() -> None:
    """What the router is for: eight conversations of four turns on three replicas."""
    talks = [f"talk {talk} " + " ".join(f"w{talk}x{word}" for word in range(60)) for talk in range(8)]
    turns = [
        Item(prompt=" ".join([talk, *(f"turn {each}" for each in range(turn))]), output_len=2, at=turn + 0.01 * number)
        for turn in range(4)
        for number, talk in enumerate(talks)
    ]
    level = Level(kind="trace", value=1, number=0, requests=len(turns))
    hits: dict[Routing, float | None] = {}
    for routing in get_args(Routing):
        found = simulated(level, workload=load(items=turns), replicas=3, routing=routing)
        hits[routing] = found.bench.levels[0].figures.cached_share
    assert hits["prefix"] is not None
    assert hits["round-robin"] is not None
    assert hits["prefix"] > 0.65 > hits["round-robin"]


@pytest.mark.full
def test_ten_thousand_replicas() -> None:
    workload = load(inputs=Span(4, 4), outputs=Span(2, 2), vocab_size=1000)
    found = simulated(at_rate(20_000, 3000), workload=workload, replicas=10_000)
    assert found.bench.levels[0].figures.succeeded == 3000
    assert found.fleets[0].replicas_used > 2500
    # With so many replicas, hardly any request waits for another.
    ttft = found.bench.levels[0].figures.ttft
    assert ttft is not None
    assert ttft.p95 == pytest.approx(0.014)

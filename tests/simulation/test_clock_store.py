"""Tiers on a virtual clock: copies take what the table says, and the engine above them is the real one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from examples import examples
from fake_tiers import FakePageStore
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import COPIES, by_clients, cost_table, load, simulated

from ostro.backends.fake import FakeRunner
from ostro.engine.batch import Batch
from ostro.engine.core import EngineCore
from ostro.engine.page_store import Arrival, Fetch, Move, Spill, Store
from ostro.engine.request import Request
from ostro.engine.runner import Step, StepOutput
from ostro.engine.tiers import Tiers
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.workload import Item
from ostro.sampling_params import SamplingParams
from ostro.simulation.clock_device import ClockRunner, ClockStore
from ostro.simulation.costs import CopyTimes, CostTable, TierPages, Work, step_seconds
from ostro.simulation.fleet import Fleet
from ostro.simulation.prompts import Prompt

# Three families of prompts by turns, so many that their pages do not fit. None comes just when a step ends.
_ARRIVALS = [(0.0500123 * number, number % 3, 30 + 7 * number % 31, 1 + 5 * number % 9) for number in range(40)]
BELOW_CPU = msgspec.structs.replace(COPIES, host=None)


def host(**changes: Any) -> CopyTimes:
    assert COPIES.host is not None
    return msgspec.structs.replace(COPIES, host=msgspec.structs.replace(COPIES.host, **changes))


def disk(**changes: Any) -> CopyTimes:
    assert COPIES.disk is not None
    return msgspec.structs.replace(COPIES, disk=msgspec.structs.replace(COPIES.disk, **changes))


def _prompt(family: int, length: int, number: int) -> Prompt:
    return Prompt((*range(family * 100, family * 100 + length), 900 + number), length + 1)


def _fleet(table: CostTable, tiers: TierPages | None) -> Fleet:
    return Fleet(table, table.endpoint("completions"), replicas=1, tiers=tiers)


class _Clocked(FakeRunner):
    """A runner with pages, whose steps take their time on a clock of its own."""

    now = ready = 0.0
    """`ready` is when the next step can begin."""

    def __init__(self, table: CostTable) -> None:
        shape = table.engine
        super().__init__(
            page_size=shape.page_size,
            num_pages=shape.num_pages,
            max_batch_tokens=shape.max_batch_tokens,
            max_batch_seqs=shape.max_batch_seqs,
        )
        self._seconds = step_seconds(table)

    def launch(self, batch: Batch) -> Step:
        step, seconds = super().launch(batch), self._seconds(Work.of(batch))

        def results() -> StepOutput:
            self.now = max(self.now, self.ready) + seconds
            return step.results()

        return Step(results, step.sample)


class _TimedStore(FakePageStore):
    """Copies real contents, each when it is due: what a page has before that is nobody's."""

    def __init__(self, runner: _Clocked, tiers: TierPages) -> None:
        super().__init__(runner, num_slots=tiers.host, disk_pages=tiers.disk)
        self._clock, self._copies = runner, tiers.copies
        self._out: list[float] = [0.0]
        self._in = self._disk_end = 0.0
        self._writes: list[float] = []
        self._due: dict[int, float] = {}

    def carry_out(self, moves: Sequence[Move]) -> None:
        clock, times = self._clock, self._copies
        for move in moves:
            match move:
                case Store():
                    assert times.host is not None
                    clock.now += times.host.pause
                    left = self._out[-times.host.staged] if len(self._out) > times.host.staged else 0.0
                    clock.ready = max(clock.now, clock.ready, left)
                    self._out.append(max(self._out[-1], clock.ready) + times.host.out)
                case Spill():
                    assert times.disk is not None
                    if sum(each > clock.now for each in self._writes) >= times.disk.waiting:
                        continue
                    clock.now += times.disk.pause
                    self._disk_end = max(self._disk_end, clock.now) + times.disk.write
                    self._writes.append(self._disk_end)
                case Fetch(ticket, sources, _) if times.host is not None:
                    clock.now += len(sources) * times.host.pause
                    self._in = max(self._in, clock.now, clock.ready, self._out[-1]) + len(sources) * times.host.back
                    self._due[ticket] = self._in
                case Fetch(ticket, sources, _):
                    assert times.disk is not None
                    self._disk_end = max(self._disk_end, clock.now) + len(sources) * times.disk.read
                    self._due[ticket] = self._disk_end
            super().carry_out([move])

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        clock, times = self._clock, self._copies
        if timeout:
            first = min(self._due[each.ticket] for each in self._under_way)
            clock.now = max(clock.now, min(first, clock.now + timeout))
        arrived = [each for each in self._under_way if self._due[each.ticket] <= clock.now]
        self._under_way = [each for each in self._under_way if each not in arrived]
        found = []
        for each in arrived:
            assert isinstance(each, Fetch)
            if times.host is not None:
                found.append(replace(self._arrive(each), seconds=len(each.pages) * times.host.back))
            else:
                assert times.disk is not None
                seconds = len(each.pages) * times.disk.read
                found.append(replace(self._arrive(each), seconds=seconds, disk_seconds=seconds))
        return found


def _on_an_engine(table: CostTable, tiers: TierPages) -> tuple[dict[int, list[float]], EngineCore]:
    runner = _Clocked(table)
    store = _TimedStore(runner, tiers)
    core = EngineCore(
        runner, tiers=Tiers(store, root=lambda salt: b"root" if tiers.disk else None), clock=lambda: runner.now
    )
    coming = list(enumerate(_ARRIVALS))
    found: dict[int, list[float]] = {number: [] for number, _ in coming}
    while coming or core.has_work:
        while coming and (coming[0][1][0] <= runner.now or not core.has_work):
            number, (at, family, length, tokens) = coming.pop(0)
            runner.now = max(runner.now, at)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            core.add(Request(id=number, prompt_ids=_prompt(family, length, number).token_ids, params=params, seed=0))
        progress = core.step()
        for gain in progress:
            found[gain.request_id] += [runner.now] * len(gain.token_ids)
    core.check_integrity()
    return found, core


def _simulated(table: CostTable, tiers: TierPages) -> tuple[dict[int, list[float]], Fleet]:
    fleet, found = _fleet(table, tiers), dict[int, list[float]]()

    def note(outcome: Outcome) -> None:
        found[outcome.index] = [outcome.start + each for each in outcome.arrivals]

    for number, (at, family, length, tokens) in enumerate(_ARRIVALS):
        prompt = _prompt(family, length, number)
        fleet.at(at, lambda n=number, p=prompt, t=tokens: fleet.send(n, p, t, note))  # type: ignore[misc]
    fleet.run()
    return found, fleet


TIERS = {
    "host": TierPages(host(), 64, 0),
    # Nothing goes to a disk that was measured and is not asked for, nor to one that was not measured.
    "small host": TierPages(host(pause=0.0003), 9, 0),
    "no disk": TierPages(msgspec.structs.replace(host(), disk=None), 9, 0),
    "slow host": TierPages(host(out=0.03, back=0.02, staged=1), 64, 0),
    "disk": TierPages(BELOW_CPU, 0, 1000),
    "slow disk": TierPages(msgspec.structs.replace(disk(write=0.5, pause=0.0002, waiting=3), host=None), 0, 1000),
}


@pytest.mark.parametrize("name", TIERS)
def test_every_token_comes_when_it_does_on_an_engine_whose_copies_take_as_long(name: str) -> None:
    table, tiers = cost_table(num_pages=28), TIERS[name]
    expected, core = _on_an_engine(table, tiers)
    found, fleet = _simulated(table, tiers)
    assert found.keys() == expected.keys()
    assert all(found[number] == pytest.approx(times) for number, times in expected.items())
    mine, real = fleet.counters, core.scheduler.counters
    assert mine.fetched_pages + mine.fetched_disk_pages > 0
    for counter in ("cache_hits", "stored_pages", "spilled_pages", "fetched_pages", "fetched_disk_pages"):
        assert getattr(mine, counter) == getattr(real, counter), counter


def _last_ttft(copies: CopyTimes | None) -> float:
    """Two prompts of 16 pages and a token by turns, where one fits: of the third turn, when both have copies."""
    items = [Item(prompt=" ".join(f"{name}{word}" for word in range(65)), output_len=1) for name in "ab"]
    tiers = None if copies is None else TierPages(copies, 64, 0)
    found = simulated(by_clients(1, 6), cost_table(num_pages=17), load(items=items), tiers=tiers)
    ttft = found.bench.levels[0].outcomes[-1].ttft
    assert ttft is not None
    return ttft


def test_a_prefix_that_is_fetched_takes_exactly_its_copies_instead_of_its_steps() -> None:
    # Steps of 32, 32 and 1 tokens, or copies of 16 pages and the last token.
    assert _last_ttft(None) == pytest.approx(0.042 + 0.042 + 0.001)
    assert _last_ttft(COPIES) == pytest.approx(16 * 0.001 + 0.001)


def test_pages_slower_to_fetch_than_to_compute_are_computed() -> None:
    assert _last_ttft(host(back=0.5)) == pytest.approx(_last_ttft(None))


def test_both_tiers_of_a_gpu_are_used_and_reported() -> None:
    items = [Item(prompt=" ".join(f"{name}{word}" for word in range(65)), output_len=1) for name in "abcd"]
    found = simulated(by_clients(1, 16), cost_table(num_pages=24), load(items=items), tiers=TierPages(COPIES, 20, 500))
    [fleet] = found.fleets
    assert min(fleet.pages_stored, fleet.pages_spilled, fleet.pages_fetched_disk) > 0
    assert 0 < fleet.hit_tokens < fleet.prompt_tokens == 16 * 65
    assert any(f"to disk {fleet.pages_spilled:,} and back" in line for line in found.lines())


def _store(copies: CopyTimes, num_slots: int = 64, disk_pages: int = 64) -> tuple[ClockRunner, ClockStore]:
    runner = ClockRunner(cost_table().engine.spec(), step_seconds(cost_table()))
    return runner, ClockStore(runner, copies, num_slots=num_slots, disk_pages=disk_pages)


def test_steps_wait_while_more_pages_leave_than_can_be_staged() -> None:
    runner, store = _store(host(out=0.010, staged=2))
    store.carry_out([Store(page, page) for page in range(2)])
    assert runner.occupy(0.0) == 0.0
    store.carry_out([Store(2, 2)])
    # Until the first has left.
    assert runner.occupy(0.0) == pytest.approx(0.010)
    assert runner.now == 0.0


def test_a_disk_slower_than_pages_come_drops_them() -> None:
    _, store = _store(disk(waiting=2))
    store.carry_out([Spill(bytes([page]), slot=page) for page in range(5)])
    assert [store.holds(bytes([page])) for page in range(5)] == [True, True, False, False, False]


def test_a_page_from_disk_comes_through_host_memory_behind_what_is_written() -> None:
    runner, store = _store(COPIES)
    store.carry_out([Spill(b"a", slot=0), Spill(b"b", slot=1), Fetch(7, (b"a", b"b", b"c"), (0, 1, 2))])
    assert store.under_way == [7]
    assert store.arrivals(timeout=0.02) == []
    assert runner.now == pytest.approx(0.02)
    # Two writes of 8 ms, two reads of 4 ms and two copies of 1 ms; the third page is not there.
    [arrival] = store.arrivals(timeout=1.0)
    assert runner.now == pytest.approx(0.026)
    assert arrival.num_good == 2
    assert arrival.seconds == pytest.approx(0.010)
    assert arrival.disk_seconds == arrival.seconds
    assert store.under_way == []


def test_the_disk_gives_up_what_was_used_least_recently() -> None:
    _, store = _store(COPIES, disk_pages=2)
    store.carry_out([Spill(b"a", slot=0), Spill(b"b", slot=1), Fetch(1, (b"a",), (0,)), Spill(b"c", slot=2)])
    assert [store.holds(each) for each in (b"a", b"b", b"c")] == [True, False, True]


REQUESTS = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(0, 4), st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=24
)


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=REQUESTS,
    slots=st.integers(0, 40),
    disk_pages=st.integers(0, 60),
    steps_ahead=st.integers(0, 1),
    out=st.floats(0, 0.05),
    back=st.floats(0, 0.05),
    staged=st.integers(1, 8),
)
def test_whatever_the_schedule_no_page_is_lost(
    requests: list[tuple[float, int, int, int]],
    slots: int,
    disk_pages: int,
    steps_ahead: int,
    out: float,
    back: float,
    staged: int,
) -> None:
    tiers = TierPages(host(out=out, back=back, staged=staged), slots, disk_pages)
    fleet = _fleet(cost_table(num_pages=20, steps_ahead=steps_ahead), tiers)
    ended: list[Outcome] = []

    def send(number: int, family: int, length: int, tokens: int) -> None:
        for replica in fleet.replicas:
            replica.core.check_integrity()
        fleet.send(number, _prompt(family, length, number), tokens, ended.append)

    at = 0.0
    for number, (gap, *rest) in enumerate(requests):
        at += gap
        fleet.at(at, lambda n=number, r=rest: send(n, *r))  # type: ignore[misc]
    fleet.run()
    assert sorted(each.index for each in ended) == list(range(len(requests)))
    for replica in fleet.replicas:
        replica.core.check_integrity()
        assert not replica.core.has_work
        assert replica.core.scheduler.kv.usage.in_use == 0

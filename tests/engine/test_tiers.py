"""Pages below the device's: what is evicted is found again, and nobody can tell from the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from engine_driver import Driver, make_request
from examples import IS_FULL, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostro.engine.costs import FetchCosts
from ostro.engine.kv import Admission
from ostro.engine.page_store import Arrival, Move, Spill
from ostro.engine.request import Request

SIZE = 4
VOCABULARY = 13
STEMS = tuple(tuple((i * i + 5 * stem) % 11 for i in range(40)) for stem in range(4))


def driver(num_pages: int = 8, **settings: Any) -> Driver:
    """Eight pages of four tokens: two prompts of 13 and 14 tokens hardly fit."""
    return Driver(page_size=SIZE, num_pages=num_pages, vocab_size=VOCABULARY, **settings)


def prompt(stem: int, id: int = 0, length: int = 17, *, salt: str = "", max_tokens: int = 3) -> Request:
    return make_request(id, STEMS[stem][:length], max_tokens=max_tokens, cache_salt=salt)


def run(made: Driver, *requests: Request) -> None:
    """One after the other, each held to what it must be given."""
    for request in requests:
        made.run(request)
        made.check_outcomes(request)


def hits(made: Driver) -> int:
    return made.engine.scheduler.counters.cache_hits


TIERS = [{"num_slots": 16}, {"disk_pages": 16}, {"num_slots": 2, "disk_pages": 16}]


@pytest.mark.parametrize("tiers", TIERS, ids=["host", "disk", "host and disk"])
def test_an_evicted_prefix_is_fetched_from_any_tier(tiers: dict[str, Any]) -> None:
    made = driver(**tiers)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    assert hits(made) == 0
    before = made.computed_tokens
    run(made, prompt(0, 3))
    assert hits(made) == 16
    assert made.computed_tokens - before == 3


def test_without_tiers_it_is_computed_again() -> None:
    made = driver()
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2), prompt(0, 3))
    assert hits(made) == 0


def test_nothing_is_copied_while_the_working_set_fits() -> None:
    made = driver(num_pages=64, num_slots=16, disk_pages=16)
    run(made, *(prompt(id % 4, id) for id in range(8)))
    counters = made.engine.scheduler.counters
    assert counters.stored_pages == counters.spilled_pages == counters.fetched_pages == 0


def test_a_page_that_was_fetched_is_evicted_again_without_a_copy() -> None:
    made = driver(num_slots=40)
    run(made, *(prompt(id % 3, id) for id in range(3)))
    run(made, *(prompt(id % 3, id) for id in range(3, 9)))
    counters = made.engine.scheduler.counters
    assert counters.fetched_pages >= 24
    # Each prompt's four pages, and what each answer has filled beside them.
    assert counters.stored_pages <= 3 * 5


def test_pages_cheaper_to_recompute_are_recomputed() -> None:
    made = driver(num_slots=16, fetched=0.0)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2), prompt(0, 3))
    assert made.engine.scheduler.counters.fetched_pages == 0
    assert hits(made) == 0


def test_a_damaged_page_on_disk_is_a_miss() -> None:
    made = driver(disk_pages=16, loss=1.0)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2), prompt(0, 3), prompt(0, 4))
    counters = made.engine.scheduler.counters
    assert counters.lost_pages == made.store.num_damaged > 0
    assert counters.fetched_disk_pages == 0


def test_pages_evicted_from_disk_or_cut_short_by_a_failure_are_not_lost() -> None:
    made = driver(disk_pages=16)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    made.add(prompt(0, 3))
    made.engine.scheduler.schedule()
    made.engine.scheduler.abort_all()
    made.add(prompt(0, 4))
    made.engine.scheduler.schedule()
    assert made.engine.scheduler.kv.is_moving
    made.store._disk.clear()
    made.finish()
    made.check_outcomes(prompt(0, 4))
    assert hits(made) == 0
    assert made.engine.scheduler.counters.lost_pages == 0


def test_pages_of_a_salt_are_found_under_it_alone_and_never_go_to_disk() -> None:
    made = driver(num_slots=16, disk_pages=64)
    run(made, prompt(0, 0, salt="mine"), prompt(1, 1, salt="mine"), prompt(2, 2, salt="mine"))
    run(made, prompt(0, 3, salt="yours"), prompt(0, 4))
    assert hits(made) == 0
    run(made, prompt(0, 5, salt="mine"))
    assert hits(made) == 16
    made = driver(disk_pages=64)
    run(made, *(prompt(id % 3, id, salt="mine") for id in range(6)))
    assert made.store.on_disk == 0
    assert hits(made) == 0


def test_requests_that_share_a_stored_prefix_fetch_it_once() -> None:
    made = driver(num_pages=16, num_slots=32)
    run(made, *(prompt(stem, stem, 33) for stem in range(3)))
    before = made.engine.scheduler.counters.fetched_pages
    together = [prompt(0, id, 33, max_tokens=2) for id in range(10, 14)]
    made.run(*together)
    made.check_outcomes(*together)
    assert made.engine.scheduler.counters.fetched_pages - before <= 8


def test_pages_are_fetched_while_their_request_waits_for_its_turn() -> None:
    made = driver(num_pages=16, num_slots=32, max_batch_tokens=4)
    run(made, *(prompt(stem, stem, 33) for stem in range(3)))
    made.add(make_request(10, (12,) * 24, max_tokens=1))
    made.add(prompt(0, 11, 17))
    for _ in range(5):
        made.step()
    assert [seq.request.id for seq in made.engine.scheduler.running] == [10]
    assert made.engine.scheduler.counters.fetched_pages == 4
    made.finish()
    made.check_outcomes(prompt(0, 11, 17))
    assert made.outcomes[11, 0].finish_reason is not None
    assert hits(made) == 16


def waiting_line(made: Driver, num_tokens: int) -> list[Request]:
    """Twelve prompts behind one that takes every step's budget for a while."""
    made.add(make_request(100, (12,) * num_tokens, max_tokens=1))
    line = [make_request(101 + at, (at, at + 1) * 8 + (12,), max_tokens=1) for at in range(12)]
    for request in line:
        made.add(request)
    return line


def test_nothing_is_looked_up_while_nothing_is_stored() -> None:
    """Every waiting prompt was once matched in every step, and again in the next."""
    made = driver(num_pages=200, disk_pages=16, max_batch_tokens=4)
    line = waiting_line(made, 80)
    for _ in range(15):
        made.step()
    assert made.store.num_asked <= 1, "only a sequence that is admitted asks"
    made.finish()
    made.check_outcomes(*line)


def test_a_waiting_prompt_is_looked_for_once_while_nothing_changes() -> None:
    made = driver(num_pages=200, disk_pages=16, max_batch_tokens=4)
    made.store.carry_out([Spill(b"another's", page=0)])
    line = waiting_line(made, 80)
    made.step()
    asked = [made.store.num_asked]
    for _ in range(15):
        made.step()
        asked.append(made.store.num_asked)
    assert asked[-1] <= 1 + len(line)
    assert max(after - before for before, after in pairwise(asked)) <= 4
    made.finish()
    made.check_outcomes(*line)


def test_the_host_gives_up_its_oldest_leaves_first() -> None:
    """Five pages are evicted: the four of the first prompt, and the last one of the second, which takes the slot of the
    first one's last.
    """
    made = driver(num_slots=4)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    run(made, prompt(0, 3))
    assert hits(made) == 12


def test_a_request_that_is_aborted_while_its_pages_arrive_leaves_nothing_behind() -> None:
    made = driver(num_slots=16)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    made.add(prompt(0, 3))
    made.engine.scheduler.schedule()
    assert made.engine.scheduler.kv.is_moving
    made.abort(3)
    assert made.engine.has_work
    made.finish()
    run(made, prompt(0, 4))


def test_pages_that_arrive_for_a_request_are_not_asked_for_a_second_time() -> None:
    """In a tight cache it was once refused for want of room while its own prefix arrived, and held up the others."""
    made = driver(num_slots=16)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    made.add(prompt(0, 3))
    scheduler = made.engine.scheduler
    for _ in range(2):
        assert scheduler.kv.admit(scheduler.waiting[0], hit_limit=16) is Admission.FETCHING
    made.finish()
    made.check_outcomes(prompt(0, 3))
    assert hits(made) == 16


def test_pages_hot_at_shutdown_stay_on_disk_though_written_first() -> None:
    made = driver(disk_pages=8)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2), prompt(0, 3))
    assert made.engine.scheduler.counters.fetched_disk_pages == 4
    made.engine.close()
    after = driver(disk_pages=8)
    after.store.inherit(made.store)
    run(after, prompt(0, 4))
    assert hits(after) == 16


def test_a_failed_step_forgets_what_was_to_be_fetched() -> None:
    made = driver(num_slots=16)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    made.add(prompt(0, 3))
    made.engine.scheduler.schedule()
    made.engine.scheduler.abort_all()
    made.engine.check_integrity()
    assert not made.engine.has_work
    run(made, prompt(0, 4))
    assert hits(made) == 0


@pytest.mark.parametrize("tiers", TIERS, ids=["host", "disk", "host and disk"])
@pytest.mark.parametrize("num_begun", range(6))
def test_an_interrupt_while_moves_begin_leaves_the_accounting_intact(tiers: dict[str, Any], num_begun: int) -> None:
    """Pages that were being fetched were once free at the same time, and their arrival was nobody's."""
    made = driver(**tiers)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    carry_out = made.store.carry_out

    def interrupted(moves: Sequence[Move]) -> None:
        made.store.carry_out = carry_out  # type: ignore[method-assign]
        carry_out(moves[:num_begun])
        raise KeyboardInterrupt

    made.store.carry_out = interrupted  # type: ignore[method-assign]
    made.add(prompt(0, 3))
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.engine.check_integrity()
    made.finish()
    run(made, *(prompt(id % 3, id) for id in range(4, 9)))
    assert hits(made) > 0


def test_an_interrupt_that_loses_an_arrival_leaves_the_accounting_intact() -> None:
    made = driver(num_slots=16)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2))
    arrivals = made.store.arrivals

    def interrupted(timeout: float = 0.0) -> list[Arrival]:
        made.store.arrivals = arrivals  # type: ignore[method-assign]
        assert arrivals(timeout=1.0)
        raise KeyboardInterrupt

    made.add(prompt(0, 3))
    made.store.arrivals = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.finish()
    run(made, prompt(0, 4))


def test_a_page_that_is_computed_sooner_than_it_arrives_is_the_one_that_is_kept() -> None:
    """The first request computes what it could have fetched; the second, which comes meanwhile, fetches it."""
    made = driver(num_pages=20, num_slots=64, max_batch_tokens=4)
    run(made, *(prompt(stem, stem, 33) for stem in range(3)))
    tiers = made.engine.tiers
    assert tiers is not None
    tiers.costs.pays = lambda *_, **__: False  # type: ignore[method-assign]
    made.add(prompt(0, 3, 33))
    made.step()
    tiers.costs.pays = lambda *_, **__: True  # type: ignore[method-assign]
    made.add(make_request(4, STEMS[0][:33], max_tokens=2, priority=-1))
    scheduler = made.engine.scheduler
    assert scheduler.kv.admit(scheduler.waiting[0], hit_limit=32) is Admission.FETCHING
    tiers.carry_out()
    arrive, made.store.arrivals = made.store.arrivals, lambda timeout=0.0: []  # type: ignore[method-assign]
    for _ in range(3):
        made.step()
    assert made.needless_fetches > 0
    made.store.arrivals = arrive  # type: ignore[method-assign]
    made.finish()
    made.check_outcomes(prompt(0, 3, 33), make_request(4, STEMS[0][:33], max_tokens=2, priority=-1))


@dataclass(frozen=True)
class Case:
    num_pages: int
    num_slots: int
    disk_pages: int
    loss: float
    fetched: float
    steps_ahead: int
    max_batch_tokens: int
    requests: tuple[tuple[int, Request], ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_pages = draw(st.integers(11, 24))
    random = Random(draw(st.integers(0, 10**6)))
    made = []
    for id in range(random.randrange(8, 20)):
        stem = STEMS[random.randrange(4)][: random.randrange(5, 34)]
        tail = tuple(random.randrange(VOCABULARY) for _ in range(random.randrange(5)))
        salt = random.choice(["", "", "", "salt"])
        n, most = random.choice([1, 1, 2]), random.randrange(1, 6)
        made.append((random.randrange(40), make_request(id, stem + tail, n=n, max_tokens=most, cache_salt=salt)))
    return Case(
        num_pages=num_pages,
        num_slots=draw(st.sampled_from([0, 1, 4, 16, 64])),
        disk_pages=draw(st.sampled_from([1, 8, 64])),
        loss=draw(st.sampled_from([0.0, 0.0, 0.4])),
        fetched=draw(st.sampled_from([0.5, 1.0, 1.0])),
        steps_ahead=draw(st.integers(0, 1)),
        max_batch_tokens=draw(st.sampled_from([4, 16, 64])),
        requests=tuple(made),
    )


@pytest.mark.examples
def test_random_schedules_over_all_tiers_give_what_is_computed_without_pages() -> None:
    seen = dict.fromkeys(("stored_pages", "spilled_pages", "fetched_pages", "fetched_disk_pages", "lost_pages"), 0)

    @settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
    @given(cases())
    def each_case_holds(case: Case) -> None:
        made = driver(
            case.num_pages,
            num_slots=case.num_slots,
            disk_pages=case.disk_pages,
            loss=case.loss,
            fetched=case.fetched,
            steps_ahead=case.steps_ahead,
            max_batch_tokens=case.max_batch_tokens,
        )
        for step in range(41):
            for at, request in case.requests:
                if at == step:
                    made.add(request)
            made.step()
        made.finish()
        made.check_outcomes(*(request for _, request in case.requests))
        for name in seen:
            seen[name] += getattr(made.engine.scheduler.counters, name)

    each_case_holds()
    assert not IS_FULL or all(seen.values()), seen


@pytest.mark.examples
def test_an_engine_that_stops_in_the_midst_of_its_work_leaves_no_wrong_page_to_the_next() -> None:
    """Pages that forks had just evicted were once written from slots that they had not reached yet."""
    found = 0

    @settings(max_examples=examples(80), suppress_health_check=[HealthCheck.too_slow])
    @given(cases(), st.integers(5, 40))
    def each_case_holds(case: Case, num_steps: int) -> None:
        nonlocal found
        made = driver(
            case.num_pages,
            num_slots=case.num_slots,
            disk_pages=1000,
            steps_ahead=case.steps_ahead,
            max_batch_tokens=case.max_batch_tokens,
        )
        for step in range(num_steps):
            for at, request in case.requests:
                if at == step:
                    made.add(request)
            made.step()
        made.engine.close()
        after = driver(64, disk_pages=1000)
        after.store.inherit(made.store)
        for _, request in case.requests:
            run(after, request)
        found += after.engine.scheduler.counters.fetched_disk_pages

    each_case_holds()
    assert not IS_FULL or found > 0


@pytest.mark.parametrize("num_slots", [4, 8])
def test_pages_just_evicted_by_a_fork_are_written_when_the_engine_stops(num_slots: int) -> None:
    pending = 0
    for seed in range(12):
        random = Random(seed)
        made = driver(random.randrange(11, 18), num_slots=num_slots, disk_pages=1000, steps_ahead=1)
        prompts = []
        for id in range(20):
            tail = tuple(random.randrange(VOCABULARY) for _ in range(3))
            prompts.append(STEMS[random.randrange(4)][: random.randrange(5, 30)] + tail)
            made.add(make_request(id, prompts[-1], n=random.choice([1, 2, 3]), max_tokens=random.randrange(1, 5)))
            made.step()
            tiers = made.engine.tiers
            assert tiers is not None
            if tiers._moves:
                pending += 1
                break
        made.engine.close()
        after = driver(64, disk_pages=1000)
        after.store.inherit(made.store)
        run(after, *(make_request(id, (*prompt, 1), max_tokens=3) for id, prompt in enumerate(prompts)))
    assert pending > 0


@pytest.mark.parametrize("disk", [False, True])
def test_fetching_pays_until_it_is_known_to_be_slower_and_is_tried_again_later(disk: bool) -> None:
    costs = FetchCosts()
    assert costs.pays(4, 64, disk=disk)
    costs.note_fetch(10, 1.0, disk=disk)
    costs.note_prompt(1000, 1.0)
    assert not costs.pays(4, 64, disk=disk)
    assert costs.pays(4, 640, disk=disk)
    answers = [costs.pays(4, 64, disk=disk) for _ in range(40)]
    assert answers.count(True) == 1
    for _ in range(100):
        costs.note_fetch(1000, 1.0, disk=disk)
    assert costs.pays(4, 64, disk=disk)


def test_a_slow_disk_says_nothing_about_host_memory() -> None:
    costs = FetchCosts()
    costs.note_prompt(1000, 1.0)
    costs.note_fetch(1000, 1.0, disk=False)
    for _ in range(100):
        costs.note_fetch(10, 1.0, disk=True)
    assert costs.pays(4, 64, disk=False)
    assert not costs.pays(4, 64, disk=True)


def test_a_look_ahead_is_no_refusal() -> None:
    """A sequence that waited for 32 steps was once taken for 32 that were refused."""
    costs = FetchCosts()
    costs.note_prompt(1000, 1.0)
    costs.note_fetch(10, 1.0, disk=True)
    assert not any(costs.pays(4, 64, disk=True, is_turn=False) for _ in range(100))
    answers = [costs.pays(4, 64, disk=True) for _ in range(33)]
    assert answers == [False] * 32 + [True]


def test_behind_a_slow_disk_what_is_in_host_memory_is_fetched_all_the_same() -> None:
    """Two slots hold the beginning of the first prompt, and the disk the rest of it."""
    made = driver(num_slots=2, disk_pages=16)
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2, 13))
    tiers = made.engine.tiers
    assert tiers is not None
    found = tiers.find(tiers._tree.match(STEMS[0], limit=16), STEMS[0], 16)
    assert found is not None
    in_slots = sum(isinstance(each.source, int) for each in found)
    assert 0 < in_slots < len(found) == 4
    tiers.costs.pays = lambda *_, disk, **__: not disk  # type: ignore[method-assign]
    run(made, prompt(0, 3))
    assert made.engine.scheduler.counters.fetched_pages == in_slots
    assert made.engine.scheduler.counters.fetched_disk_pages == 0
    assert hits(made) == in_slots * SIZE


def test_each_tier_is_judged_by_its_own_seconds() -> None:
    made = driver(num_slots=2, disk_pages=16)
    costs = FetchCosts()
    tiers = made.engine.tiers
    assert tiers is not None
    run(made, prompt(0, 0), prompt(1, 1), prompt(2, 2, 13))
    tiers.costs = costs
    arrivals = made.store.arrivals

    def slow(timeout: float = 0.0) -> list[Arrival]:
        return [replace(each, seconds=10.0, disk_seconds=9.999) for each in arrivals(timeout)]

    made.store.arrivals = slow  # type: ignore[method-assign]
    run(made, prompt(0, 3))
    costs.note_prompt(1000, 1.0)
    assert costs.pays(1, SIZE, disk=False)
    assert not costs.pays(1, SIZE, disk=True)


def test_an_arrival_of_nothing_says_nothing_about_the_pace() -> None:
    costs = FetchCosts()
    costs.note_fetch(0, 5.0, disk=True)
    costs.note_prompt(1000, 1.0)
    assert costs.pays(1, 16, disk=True)

"""States below the device's slots: a snapshot that was given up is found again, and nobody can tell from the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from engine_driver import Driver, make_request
from examples import IS_FULL, examples
from fake_tiers import Shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostro.engine.page_store import Arrival, Fetch, Move
from ostro.engine.request import Request
from ostro.engine.states import Spacing

SIZE = 4
VOCABULARY = 13
STEMS = tuple(tuple((i * i + 5 * stem) % 11 for i in range(40)) for stem in range(6))
NONE_BETWEEN = Spacing(prompt=1_000_000, output=1_000_000)
TIERS = [
    {"num_slots": 16, "num_state_slots": 4},
    {"disk_pages": 64},
    {"num_slots": 4, "num_state_slots": 1, "disk_pages": 64},
]
NAMES = ["host", "disk", "host and disk"]


def driver(num_pages: int = 11, **settings: Any) -> Driver:
    return Driver(
        page_size=SIZE,
        num_pages=num_pages,
        vocab_size=VOCABULARY,
        **{"num_states": 8, "spacing": NONE_BETWEEN, **settings},
    )


def prompt(stem: int, id: int = 0, length: int = 17, **settings: Any) -> Request:
    """Leaves a snapshot at the end of its fourth page only."""
    return make_request(id, STEMS[stem][:length], anchors=(16,), **{"max_tokens": 3, **settings})


def fill(made: Driver) -> None:
    """Takes all pages for a while, and leaves no snapshot."""
    run(made, make_request(999, (12, 11, 12), max_tokens=made.runner.spec.num_pages * SIZE - 3))


def run(made: Driver, *requests: Request) -> None:
    """One after the other, each held to what it must be given."""
    for request in requests:
        made.run(request)
        made.check_outcomes(request)


def run_hot(made: Driver, stem: int = 0, hits: int = 2) -> None:
    """Hits a prompt's snapshot so many times, then evicts it with its pages."""
    run(made, *(prompt(stem, id) for id in range(1 + hits)))
    fill(made)


def hits(made: Driver) -> int:
    return made.engine.scheduler.counters.cache_hits


@pytest.mark.parametrize("tiers", TIERS, ids=NAMES)
def test_a_hot_prefix_is_fetched_with_its_state_from_any_tier(tiers: dict[str, Any]) -> None:
    made = driver(**tiers)
    run_hot(made)
    before, computed = hits(made), made.computed_tokens
    assert made.engine.num_found(STEMS[0][:17]) == 16
    run(made, prompt(0, 50))
    assert hits(made) - before == 16
    assert made.computed_tokens - computed == 3
    assert made.engine.scheduler.counters.fetched_states == 1


@pytest.mark.parametrize(
    ("tiers", "hits_before", "kept"),
    [(TIERS[0], 0, [16]), (TIERS[0], 1, [8, 16]), (TIERS[1], 1, [16]), (TIERS[1], 2, [8, 16])],
)
def test_the_last_state_of_a_path_goes_down_and_one_before_it_if_it_is_hit(
    tiers: dict[str, Any], hits_before: int, kept: list[int]
) -> None:
    """Once for host memory, twice for disk."""
    made = driver(**tiers)
    run(made, make_request(0, STEMS[0][:17], anchors=(8, 16), max_tokens=3))
    run(made, *(make_request(1 + id, (*STEMS[0][:8], 12, id), max_tokens=1) for id in range(hits_before)))
    assert hits(made) == 8 * hits_before
    fill(made)
    assert made.engine.scheduler.kv.usage.snapshots == 0
    states = [*made.store._state_slots, *(each for each in made.store._disk.values() if not isinstance(each, list))]
    assert sorted(state.end for state in states if state is not None) == kept
    counters = made.engine.scheduler.counters
    # Nobody would find pages that lead to no state.
    assert counters.stored_pages + counters.spilled_pages == 4
    assert made.engine.num_found(STEMS[0][:17]) == 16


def test_a_state_whose_slot_was_needed_is_fetched_to_the_page_that_stayed() -> None:
    made = driver(200, num_states=2, num_slots=40, num_state_slots=4)
    run(made, prompt(0, 0), prompt(0, 1), prompt(1, 2), prompt(2, 3))
    before = hits(made)
    run(made, prompt(0, 4))
    assert hits(made) - before == 16
    counters = made.engine.scheduler.counters
    assert (counters.fetched_states, counters.fetched_pages) == (1, 0)


def test_with_a_single_slot_the_state_arrives_in_it_and_is_taken_from_there() -> None:
    made = driver(200, num_states=1, num_slots=40, num_state_slots=4, spacing=Spacing(prompt=8))
    for id in range(4):
        run(made, prompt(id % 2, id))
    run(made, prompt(0, 4), prompt(1, 5), prompt(0, 6))


def test_of_states_in_host_memory_the_least_recently_used_goes_to_disk() -> None:
    made = driver(num_slots=40, num_state_slots=1, disk_pages=64)
    run(made, prompt(0, 0), prompt(0, 1), prompt(0, 2), prompt(1, 3), prompt(1, 4))
    fill(made)
    counters = made.engine.scheduler.counters
    assert (counters.stored_states, counters.spilled_states) == (2, 1)
    assert [made.engine.num_found(STEMS[stem][:17]) for stem in (0, 1)] == [16, 16]
    run(made, prompt(0, 20), prompt(1, 21))
    assert counters.fetched_states == 2


def test_states_cheaper_to_recompute_are_recomputed() -> None:
    made = driver(num_slots=40, num_state_slots=4, fetched=0.0)
    run_hot(made)
    before = hits(made)
    run(made, prompt(0, 50))
    assert (hits(made) - before, made.engine.scheduler.counters.fetched_states) == (0, 0)


@pytest.mark.parametrize("lost", ["page", "state"])
def test_a_fetch_that_fails_half_way_falls_back_to_computing(lost: str) -> None:
    made = driver(disk_pages=64)
    run_hot(made)
    computed = made.computed_tokens
    made.add(prompt(0, 50))
    made.engine.scheduler.schedule()
    [fetch] = [move for move in made.engine.tiers._moves if isinstance(move, Fetch)]  # type: ignore[union-attr]
    assert fetch.state is not None
    gone = fetch.sources[2] if lost == "page" else fetch.state.source
    assert isinstance(gone, bytes)
    del made.store._disk[gone]
    made.finish()
    made.check_outcomes(prompt(0, 50))
    assert made.computed_tokens - computed == 19
    usage = made.engine.scheduler.kv.usage
    assert usage.states_free + usage.snapshots == usage.states


def test_a_shallower_state_on_the_device_serves_when_the_deeper_is_lost() -> None:
    made = driver(13, disk_pages=64)
    both = {"length": 21, "max_tokens": 1}
    for id in range(3):
        run(made, make_request(id, STEMS[0][:21], anchors=(8, 20), max_tokens=1))
    fill(made)
    assert made.engine.num_found(STEMS[0][:21]) == 20
    [deepest] = [digest for digest, record in made.store._disk.items() if not isinstance(record, list)]
    del made.store._disk[deepest]
    assert made.engine.num_found(STEMS[0][:21]) < 20
    run(made, prompt(0, 50, **both))


def test_requests_that_share_a_stored_state_fetch_it_once() -> None:
    made = driver(24, num_slots=40, num_state_slots=4)
    run_hot(made, hits=1)
    run(made, *(prompt(stem, 60 + stem) for stem in range(1, 6)))
    together = [prompt(0, id) for id in range(70, 74)]
    made.run(*together)
    made.check_outcomes(*together)
    assert made.engine.scheduler.counters.fetched_states <= 1


def test_a_request_that_is_aborted_while_its_state_arrives_leaves_nothing_behind() -> None:
    made = driver(num_slots=40, num_state_slots=4)
    run_hot(made)
    made.add(prompt(0, 50))
    made.engine.scheduler.schedule()
    assert made.engine.scheduler.kv.is_moving
    made.abort(50)
    made.finish()
    run(made, prompt(0, 51))


def test_states_of_a_salt_are_found_under_it_alone_and_never_go_to_disk() -> None:
    made = driver(num_slots=40, num_state_slots=4, disk_pages=64)
    run(made, *(prompt(0, id, cache_salt="mine") for id in range(3)))
    fill(made)
    before = hits(made)
    run(made, prompt(0, 50, cache_salt="yours"))
    assert hits(made) == before
    run(made, prompt(0, 51, cache_salt="mine"))
    assert hits(made) - before == 16
    assert made.engine.scheduler.counters.spilled_states == 0


@pytest.mark.parametrize("tiers", TIERS, ids=NAMES)
@pytest.mark.parametrize("num_begun", range(6))
def test_an_interrupt_while_states_move_leaves_the_accounting_intact(tiers: dict[str, Any], num_begun: int) -> None:
    made = driver(**tiers)
    run_hot(made)
    carry_out = made.store.carry_out

    def interrupted(moves: Sequence[Move]) -> None:
        made.store.carry_out = carry_out  # type: ignore[method-assign]
        carry_out(moves[:num_begun])
        raise KeyboardInterrupt

    made.store.carry_out = interrupted  # type: ignore[method-assign]
    made.add(prompt(0, 50))
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.engine.check_integrity()
    made.finish()
    run_hot(made)
    run(made, prompt(0, 51))


def test_an_arrival_that_is_lost_leaves_the_accounting_intact() -> None:
    made = driver(num_slots=40, num_state_slots=4)
    run_hot(made)
    arrivals = made.store.arrivals

    def interrupted(timeout: float = 0.0) -> list[Arrival]:
        made.store.arrivals = arrivals  # type: ignore[method-assign]
        assert arrivals(timeout=1.0)
        raise KeyboardInterrupt

    made.add(prompt(0, 50))
    made.store.arrivals = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.finish()
    run(made, prompt(0, 51))


def test_a_slot_that_the_next_step_reads_is_not_overwritten_by_an_arrival() -> None:
    """A hit's copy runs with the next step, and a fetch begins before it."""
    made = driver(200, num_states=3, num_slots=40, num_state_slots=4)
    run(made, prompt(0, 0), prompt(0, 1), prompt(1, 2), prompt(1, 3), prompt(2, 4), prompt(2, 5))
    for _ in range(4):
        requests = [prompt(stem, 20 + stem, max_tokens=1) for stem in (0, 1, 2)]
        made.run(*requests)
        made.check_outcomes(*requests)


# ---- other engines, and the next start


def offered(made: Driver, length: int) -> int:
    told: list[int] = []
    made.engine.offer(STEMS[0][:length], None, told.append)
    made.finish()
    [num_tokens] = told
    return num_tokens


def test_what_is_offered_ends_at_a_state_and_others_continue_from_it() -> None:
    shared: Shared = {}
    first, second = driver(64, shared=shared), driver(64, shared=shared)
    run(first, prompt(0, 0, 30))
    assert offered(first, 30) == 16
    # Five records: four pages and a state.
    assert len(shared) == 5
    assert offered(first, 30) == 16
    assert second.engine.num_found(STEMS[0][:30]) == 16
    run(second, prompt(0, 0, 30))
    assert hits(second) == 16


def test_a_conversation_that_pauses_goes_on_where_it_was() -> None:
    """Nothing hits its last state before it comes back: conversations that had no room once began anew each turn."""
    made, said = driver(20, num_slots=200, num_state_slots=20), [list(STEMS[stem][:9]) for stem in range(5)]
    for turn in range(4):
        for stem, history in enumerate(said):
            history += [(turn + at * at) % 11 for at in range(6)] + [12]
            before, request = hits(made), make_request(10 * turn + stem, history, max_tokens=3, anchors=(len(history),))
            run(made, request)
            assert not turn or hits(made) - before >= len(history) - 7 - 3 - 2 * SIZE
            history += made.outcomes[request.id, 0].token_ids


@pytest.mark.parametrize("anchors", [(8,), ()])
def test_a_prompt_computed_for_others_leaves_a_state_at_the_last_page_that_they_can_use(
    anchors: tuple[int, ...],
) -> None:
    for length, found in ((18, 16), (17, 16), (16, 12), (20, 16)):
        shared: Shared = {}
        first, second = driver(64, shared=shared), driver(64, shared=shared)
        first.run(make_request(0, STEMS[0][:length], max_tokens=0, anchors=anchors, shares_prompt=True))
        assert offered(first, length) == found
        assert second.engine.num_found(list(STEMS[0][:length])) == found
        run(second, prompt(0, 0, length))
        assert hits(second) == found


def test_a_prefix_that_is_let_go_for_want_of_a_slot_can_be_evicted_again() -> None:
    """The end of its path is in host memory: the last page that is resident was no longer a candidate."""
    made = driver(14, num_states=2, num_slots=40, num_state_slots=4)
    run(made, prompt(0))
    scheduler = made.engine.scheduler
    kv = scheduler.kv
    kv._allocator.release(kv._tree.evict(2))
    for number in range(2):
        made.add(make_request(10 + number, (12 - number, 5, 5), max_tokens=30))
    made.step()
    made.step()
    made.add(prompt(0, 50))
    [seq] = scheduler.waiting
    assert kv._states is not None
    assert not kv._states.num_free
    kv.fetch_ahead(seq, hit_limit=16, spare=2)
    scheduler.abort(50)
    made.finish()


def test_a_prompt_whose_state_was_not_written_is_not_told_to_be_shared() -> None:
    told = [offered(made, 17) for made in (_after_losses(seed) for seed in range(8))]
    assert set(told) == {0, 16}


def _after_losses(seed: int) -> Driver:
    made = driver(64, shared={}, loss=0.5)
    made.store._random = Random(seed)
    run(made, prompt(0))
    return made


def test_everything_an_engine_holds_is_offered_with_its_states() -> None:
    shared: Shared = {}
    made, told = driver(64, shared=shared), list[None]()
    run(made, *(prompt(stem, stem) for stem in range(3)))
    made.engine.offer_all(lambda: told.append(None))
    made.finish()
    assert told == [None]
    after = driver(64, shared=shared)
    run(after, *(prompt(stem, stem) for stem in range(3)))
    assert hits(after) == 48


def test_the_next_start_continues_from_states_that_end_a_path_or_have_been_hit() -> None:
    made = driver(64, disk_pages=64)
    run(made, make_request(0, STEMS[0][:29], anchors=(8, 16, 24), max_tokens=1))
    run(made, make_request(1, (*STEMS[0][:10], 1, 2), max_tokens=1))
    made.engine.close()
    written = [record for record in made.store._disk.values() if not isinstance(record, list)]
    assert sorted(state.end for state in written) == [8, 12, 24]
    after = driver(64, disk_pages=64)
    after.store.inherit(made.store)
    run(after, prompt(0, 0, 30))
    assert hits(after) == 24


# ---- random schedules


@dataclass(frozen=True)
class Case:
    num_pages: int
    num_states: int
    num_slots: int
    num_state_slots: int
    disk_pages: int
    loss: float
    fetched: float
    steps_ahead: int
    max_batch_tokens: int
    max_sampled: int
    requests: tuple[tuple[int, Request], ...]

    def driver(self, **settings: Any) -> Driver:
        made = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "requests"}
        spacing = Spacing(prompt=8, output=4)
        return driver(**{**made, "accuracy": 0.7, "spacing": spacing, **settings})


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = Random(draw(st.integers(0, 10**6)))
    made = []
    for id in range(random.randrange(16, 40)):
        stem = STEMS[random.choice([0, 0, 1, 1, 2, 3])][: random.randrange(5, 34)]
        tail = tuple(random.randrange(VOCABULARY) for _ in range(random.randrange(5)))
        salt = random.choice(["", "", "", "", "", "salt"])
        n, most = random.choice([1, 1, 2]), random.randrange(1, 12)
        request = make_request(id, stem + tail, n=n, max_tokens=most, cache_salt=salt, anchors=(8, 16))
        made.append((random.randrange(60), request))
    return Case(
        num_pages=draw(st.integers(13, 26)),
        num_states=draw(st.sampled_from([1, 2, 3, 6, 12])),
        num_slots=draw(st.sampled_from([0, 4, 16, 64])),
        num_state_slots=draw(st.sampled_from([0, 1, 2, 8])),
        disk_pages=draw(st.sampled_from([0, 8, 64, 64])),
        loss=draw(st.sampled_from([0.0, 0.0, 0.4])),
        fetched=draw(st.sampled_from([0.5, 1.0, 1.0])),
        steps_ahead=draw(st.integers(0, 1)),
        max_batch_tokens=draw(st.sampled_from([4, 16, 64])),
        max_sampled=draw(st.sampled_from([0, 0, 64])),
        requests=tuple(made),
    )


@pytest.mark.examples
def test_random_schedules_with_states_over_all_tiers_give_what_is_computed_without() -> None:
    names = (
        "resumed",
        "stored_states",
        "spilled_states",
        "fetched_states",
        "fetched_pages",
        "fetched_disk_pages",
        "lost_pages",
    )
    seen = dict.fromkeys(names, 0)

    @settings(max_examples=examples(64), suppress_health_check=[HealthCheck.too_slow])
    @given(cases())
    def each_case_holds(case: Case) -> None:
        made = case.driver()
        for step in range(61):
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


@pytest.mark.full
@pytest.mark.examples
def test_an_engine_that_stops_in_the_midst_of_its_work_leaves_no_wrong_state_to_the_next() -> None:
    found = 0

    @settings(max_examples=examples(48), suppress_health_check=[HealthCheck.too_slow])
    @given(cases(), st.integers(5, 60))
    def each_case_holds(case: Case, num_steps: int) -> None:
        nonlocal found
        made = case.driver(disk_pages=1000)
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
        found += after.engine.scheduler.counters.fetched_states

    each_case_holds()
    assert not IS_FULL or found > 0


# ---- parking


def crowd(count: int = 3, max_tokens: int = 30) -> list[Request]:
    return [make_request(id, STEMS[id][:7], max_tokens=max_tokens) for id in range(count)]


def computed_again(made: Driver) -> int:
    """Tokens that were computed more than once."""
    seen: dict[tuple[int, int], int] = {}
    for chunk in (chunk for batch in made.runner.batches for chunk in batch.chunks):
        for position in range(chunk.start, chunk.end):
            seen[chunk.seq.id, position] = seen.get((chunk.seq.id, position), 0) + 1
    return sum(count - 1 for count in seen.values())


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("tiers", TIERS, ids=NAMES)
def test_a_preempted_sequence_resumes_at_the_same_token(tiers: dict[str, Any], steps_ahead: int) -> None:
    made = driver(16, steps_ahead=steps_ahead, **{**tiers, "num_slots": 40 if "num_slots" in tiers else 0})
    made.run(*crowd())
    made.check_outcomes(*crowd())
    counters = made.engine.scheduler.counters
    assert counters.resumed == counters.preemptions > 0
    assert computed_again(made) == 0


def test_without_lower_tiers_it_starts_over() -> None:
    made = driver(16)
    made.run(*crowd())
    made.check_outcomes(*crowd())
    assert made.engine.scheduler.counters.preemptions > 0
    assert made.engine.scheduler.counters.resumed == 0
    assert computed_again(made) > 0


def test_a_parked_state_goes_down_as_it_is_when_its_slot_is_needed() -> None:
    made = driver(16, num_states=3, num_slots=40, num_state_slots=4)
    requests = [*crowd(), make_request(9, STEMS[5][:5], max_tokens=2, priority=-1)]
    for request in requests[:3]:
        made.add(request)
    while not made.engine.scheduler.counters.preemptions:
        made.step()
    made.add(requests[3])
    made.finish()
    made.check_outcomes(*requests)
    counters = made.engine.scheduler.counters
    assert counters.stored_states > 0
    assert counters.resumed > 0


def test_where_there_is_no_room_for_it_the_sequence_starts_over() -> None:
    for tiers in ({"num_slots": 1, "num_state_slots": 1}, {"num_slots": 40, "num_state_slots": 0}):
        made = driver(16, num_states=3, **tiers)
        requests = [*crowd(), make_request(9, STEMS[5][:5], max_tokens=12, priority=-1)]
        for request in requests[:3]:
            made.add(request)
        while not made.engine.scheduler.counters.preemptions:
            made.step()
        made.add(requests[3])
        made.finish()
        made.check_outcomes(*requests)
        counters = made.engine.scheduler.counters
        assert counters.resumed < counters.preemptions


def test_a_parked_sequence_that_is_aborted_leaves_nothing_behind() -> None:
    made = driver(16, num_slots=40, num_state_slots=4)
    for request in crowd():
        made.add(request)
    while not made.engine.scheduler.counters.preemptions:
        made.step()
    [parked] = made.engine.scheduler.waiting
    made.abort(parked.request.id)
    made.finish()
    usage = made.engine.scheduler.kv.usage
    assert usage.states_free + usage.snapshots == usage.states


def test_one_whose_pages_are_forgotten_starts_over() -> None:
    made = driver(16, num_slots=40, num_state_slots=4)
    for request in crowd():
        made.add(request)
    while not made.engine.scheduler.counters.preemptions:
        made.step()
    made.engine.scheduler.kv.clear_cache()
    made.finish()
    made.check_outcomes(*crowd())
    assert computed_again(made) > 0

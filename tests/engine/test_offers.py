"""Prefixes that engines leave to one another: another engine finds them, and nobody can tell from the tokens."""

from random import Random
from typing import Any

import pytest
from engine_driver import Driver, make_request
from examples import IS_FULL, examples
from fake_tiers import Shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostro.engine.request import Request

SIZE = 4
VOCABULARY = 13
STEMS = tuple(tuple((i * i + 5 * stem) % 11 for i in range(40)) for stem in range(4))


def driver(shared: Shared | None, num_pages: int = 32, **settings: Any) -> Driver:
    return Driver(page_size=SIZE, num_pages=num_pages, vocab_size=VOCABULARY, shared=shared, **settings)


def prompt(stem: int, id: int = 0, length: int = 17, **settings: Any) -> Request:
    return make_request(id, STEMS[stem][:length], max_tokens=3, **settings)


def run(made: Driver, *requests: Request) -> None:
    for request in requests:
        made.run(request)
        made.check_outcomes(request)


def offered(made: Driver, stem: int, length: int = 17) -> int:
    """How many tokens others find, once the engine has told."""
    told: list[int] = []
    made.engine.offer(STEMS[stem][:length], None, told.append)
    made.finish()
    [num_tokens] = told
    return num_tokens


def offer_all(made: Driver) -> None:
    told: list[None] = []
    made.engine.offer_all(lambda: told.append(None))
    made.finish()
    assert told == [None]


def hits(made: Driver) -> int:
    return made.engine.scheduler.counters.cache_hits


def test_a_prompt_that_one_engine_has_computed_is_not_computed_by_another() -> None:
    shared: Shared = {}
    first, second = driver(shared), driver(shared)
    run(first, prompt(0))
    assert second.engine.num_found(STEMS[0][:17]) == 0
    assert offered(first, 0) == 16
    assert second.engine.num_found(STEMS[0][:17]) == 16
    run(second, prompt(0))
    assert hits(second) == 16
    assert second.computed_tokens == 3


def test_pages_already_shared_are_not_written_again() -> None:
    shared: Shared = {}
    made = driver(shared)
    run(made, prompt(0))
    assert offered(made, 0) == offered(made, 0) == 16
    assert made.engine.scheduler.counters.offered_pages == 4
    run(made, prompt(0, 1, 30))
    assert offered(made, 0, 30) == 28
    assert made.engine.scheduler.counters.offered_pages == 7


def test_uncomputed_pages_are_not_offered() -> None:
    made = driver({})
    assert offered(made, 0) == 0
    run(made, prompt(0, 0, 9))
    assert offered(made, 0, 30) == 8


def test_prompts_with_a_salt_are_offered_to_nobody() -> None:
    shared: Shared = {}
    made = driver(shared)
    run(made, prompt(0, cache_salt="mine"))
    assert offered(made, 0) == 0
    offer_all(made)
    made.engine.close()
    assert not shared


def test_an_engine_without_others_offers_nothing() -> None:
    for made in (driver(None, disk_pages=8), driver(None)):
        run(made, prompt(0))
        assert offered(made, 0) == 0
        offer_all(made)
        assert not made.engine.has_work


def test_only_what_was_written_counts_from_the_first_page_on() -> None:
    shared: Shared = {}
    made = driver(shared, loss=1.0)
    run(made, prompt(0, 0, 33))
    told = offered(made, 0, 33)
    assert told == len(shared) * SIZE < 32


def test_everything_an_engine_holds_is_offered_latest_first() -> None:
    shared: Shared = {}
    made = driver(shared, num_pages=64)
    run(made, *(prompt(stem, stem) for stem in range(4)), prompt(1, 4))
    used = [node.last_used for node in made.engine.scheduler.kv._tree.nodes()]
    told: list[None] = []
    made.engine.offer_all(lambda: told.append(None))
    before: list[int] = []
    while made.engine.has_work:
        assert not told
        made.step()
        before.append(len(shared))
    assert told == [None]
    assert [node.last_used for node in made.engine.scheduler.kv._tree.nodes()] == used, "sharing is no use"
    other = driver(dict(list(shared.items())[:4]))
    run(other, prompt(1))
    assert hits(other) == 16
    assert before[0] < before[-1] == 16 + 4 * (19 // SIZE - 4)
    other = driver(shared)
    run(other, *(prompt(stem, stem) for stem in range(4)))
    assert hits(other) == 64


def test_an_engine_that_stops_leaves_what_it_holds_to_others() -> None:
    shared: Shared = {}
    made = driver(shared, num_pages=8, num_slots=16)
    run(made, *(prompt(stem, stem) for stem in range(3)))
    made.engine.close()
    other = driver(shared)
    run(other, *(prompt(stem, stem) for stem in range(3)))
    assert hits(other) == 48


def test_evicted_pages_are_not_copied_when_only_sharing_is_on() -> None:
    made = driver({}, num_pages=8)
    run(made, *(prompt(stem, stem) for stem in range(3)))
    assert made.engine.scheduler.counters.spilled_pages == 0


def test_only_the_arriving_part_of_a_prompt_is_found() -> None:
    """All of it once counted, however long it was."""
    shared: Shared = {}
    first, second = driver(shared), driver(shared)
    run(first, prompt(0, 0, 9))
    assert offered(first, 0, 9) == 8
    second.add(prompt(0, 1, 9))
    second.engine.scheduler.schedule()
    assert second.engine.num_found((*STEMS[0][:8], *range(12))) == 8
    second.finish()


def test_a_request_that_needs_the_pages_waits_until_they_are_written() -> None:
    """All pages are locked by the offer, and come free when it ends."""
    made = driver({}, num_pages=8)
    run(made, prompt(0, 0, 29))
    made.engine.offer(STEMS[0][:29], None, lambda _: None)
    made.run(prompt(1, 1, 25))
    made.check_outcomes(prompt(1, 1, 25))


def test_a_failed_step_ends_offers_that_had_not_begun() -> None:
    made = driver({})
    run(made, prompt(0))
    told: list[int] = []
    made.engine.offer(STEMS[0][:17], None, told.append)
    made.engine.scheduler.abort_all()
    made.engine.check_integrity()
    assert told == [0]
    assert not made.engine.has_work


@pytest.mark.full
@pytest.mark.examples
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_random_schedules_of_engines_that_share_give_what_is_computed_without_pages(steps_ahead: int) -> None:
    seen = dict.fromkeys(("offered_pages", "fetched_disk_pages", "fetched_pages", "preemptions"), 0)

    @settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.integers(0, 10**6),
        st.integers(11, 24),
        st.sampled_from([0, 1, 16]),
        st.sampled_from([0.0, 0.0, 0.4]),
        st.sampled_from([4, 16, 64]),
    )
    def each_case_holds(seed: int, num_pages: int, num_slots: int, loss: float, max_batch_tokens: int) -> None:
        random, shared = Random(seed), Shared()
        made = [
            driver(
                shared,
                num_pages,
                num_slots=num_slots,
                loss=loss,
                steps_ahead=steps_ahead,
                max_batch_tokens=max_batch_tokens,
            )
            for _ in range(2)
        ]
        requests: list[list[Request]] = [[], []]
        for id in range(random.randrange(20, 60)):
            at = random.randrange(2)
            stem, length = random.randrange(4), random.randrange(5, 34)
            match random.randrange(5):
                case 0:
                    made[at].engine.offer(STEMS[stem][:length], None, lambda _: None)
                case 1 if not random.randrange(4):
                    made[at].engine.offer_all(lambda: None)
                case _:
                    tail = tuple(random.randrange(VOCABULARY) for _ in range(random.randrange(5)))
                    salt = random.choice(["", "", "", "salt"])
                    request = make_request(
                        id,
                        STEMS[stem][:length] + tail,
                        n=random.choice([1, 1, 2]),
                        max_tokens=random.randrange(1, 6),
                        cache_salt=salt,
                    )
                    made[at].add(request)
                    requests[at].append(request)
            if requests[at] and not random.randrange(8):
                gone = requests[at].pop(random.randrange(len(requests[at])))
                made[at].abort(gone.id)
            for each in made:
                each.step()
        for each, asked in zip(made, requests, strict=True):
            each.finish()
            each.check_outcomes(*asked)
            for name in seen:
                seen[name] += getattr(each.engine.scheduler.counters, name)

    each_case_holds()
    assert not IS_FULL or all(seen.values()), seen

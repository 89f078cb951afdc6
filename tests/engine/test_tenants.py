"""Several tenants in one engine: each gets its share of seats, pages and tokens, whatever the others ask for."""

import pytest
from engine_driver import Driver, make_request

from ostro.engine.request import Request
from ostro.engine.tenants import divide


def flood(count: int, *, tokens: int = 4, max_tokens: int = 40, first: int = 100) -> list[Request]:
    return [
        make_request(first + number, [first + number] * tokens, max_tokens=max_tokens, tenant="hostile")
        for number in range(count)
    ]


def running(driver: Driver) -> list[str]:
    return [seq.request.tenant for seq in driver.engine.scheduler.running]


def steps_until_first_token(driver: Driver, request_id: int) -> int:
    for count in range(1, 1000):
        if any(gain.request_id == request_id and gain.token_ids for gain in driver.step()):
            return count
    raise AssertionError("it never came")


def test_tenant_that_fills_the_batch_gives_up_seats_to_another() -> None:
    """Another tenant's first request waited until one of the flood had ended."""
    driver = Driver(max_batch_seqs=4, num_pages=1000)
    requests = flood(20)
    for request in requests:
        driver.add(request)
    driver.step()
    assert running(driver) == ["hostile"] * 4
    polite = [make_request(number, [number] * 4, max_tokens=20, tenant="polite") for number in (1, 2, 3)]
    for request in polite:
        driver.add(request)
    assert steps_until_first_token(driver, 1) == 1
    driver.step()
    assert sorted(running(driver)) == ["hostile"] * 2 + ["polite"] * 2
    driver.finish()
    driver.check_outcomes(*requests, *polite)


def test_tenant_whose_sequences_hold_all_pages_gives_up_some() -> None:
    driver = Driver(page_size=4, num_pages=32, max_batch_seqs=64)
    requests = flood(4, tokens=20, max_tokens=12)
    for request in requests:
        driver.add(request)
    for _ in range(4):
        driver.step()
    polite = make_request(1, [1] * 20, max_tokens=8, tenant="polite")
    driver.add(polite)
    assert steps_until_first_token(driver, 1) <= 3
    driver.finish()
    driver.check_outcomes(*requests, polite)


def test_long_prompt_of_one_tenant_leaves_half_of_each_step_to_anothers() -> None:
    """A prompt of 8,000 tokens was computed to its end before the next one began."""
    driver = Driver(num_pages=1000, max_batch_tokens=16)
    requests = flood(3, tokens=400, max_tokens=2)
    for request in requests:
        driver.add(request)
    driver.step()
    polite = make_request(1, [1] * 24, max_tokens=2, tenant="polite")
    driver.add(polite)
    driver.step()
    driver.step()
    assert [(chunk.seq.request.tenant, chunk.length) for chunk in driver.runner.batches[-1].chunks] == [
        ("hostile", 8),
        ("polite", 8),
    ]
    driver.finish()
    driver.check_outcomes(*requests, polite)


def test_first_prompt_of_a_tenant_has_a_step_of_its_own() -> None:
    """It was read in one step with the next tokens of all others, which took thrice as long."""
    driver = Driver(num_pages=1000)
    requests = flood(20)
    for request in requests:
        driver.add(request)
    driver.step()
    polite = make_request(1, [1] * 24, max_tokens=2, tenant="polite")
    driver.add(polite)
    assert steps_until_first_token(driver, 1) == 1
    assert [chunk.seq.request.id for chunk in driver.runner.batches[-1].chunks] == [1]
    driver.step()
    assert len(driver.runner.batches[-1].chunks) == 21
    driver.finish()
    driver.check_outcomes(*requests, polite)


def test_tenants_that_come_and_go_leave_every_second_step_to_those_that_stay() -> None:
    driver = Driver(num_pages=1000)
    [staying] = flood(1, max_tokens=20)
    driver.add(staying)
    driver.step()
    for number in range(10):
        driver.add(make_request(number, [number] * 4, max_tokens=1, tenant=f"tenant-{number}"))
        driver.step()
    took_part = [any(chunk.seq.request.id == staying.id for chunk in batch.chunks) for batch in driver.runner.batches]
    assert sum(took_part[1:]) >= 5
    driver.finish()


def test_newcomer_of_lower_priority_stops_nobody() -> None:
    driver = Driver(num_pages=1000)
    driver.add(make_request(100, [100] * 4, max_tokens=10, tenant="urgent"))
    driver.step()
    driver.add(make_request(1, [1] * 4, max_tokens=2, priority=1, tenant="patient"))
    driver.step()
    assert [chunk.seq.request.id for chunk in driver.runner.batches[-1].chunks] == [100, 1]
    driver.finish()


def test_many_queued_prompts_do_not_admit_a_key_first() -> None:
    driver = Driver(max_batch_seqs=2, num_pages=1000)
    requests = flood(10, max_tokens=3)
    for request in requests:
        driver.add(request)
    polite = [make_request(number, [number] * 4, max_tokens=3, tenant="polite") for number in (1, 2)]
    for request in polite:
        driver.add(request)
    begun: list[int] = []
    while len(begun) < 4:
        driver.step()
        begun += driver.engine.scheduler.begun
    assert begun[:4] == [100, 1, 101, 2]
    driver.finish()


def test_more_tenants_than_seats_take_turns() -> None:
    driver = Driver(max_batch_seqs=2, num_pages=1000)
    requests = [make_request(number, [number] * 4, max_tokens=6, tenant=f"tenant-{number % 5}") for number in range(20)]
    driver.run(*requests)
    driver.check_outcomes(*requests)


def test_tenant_that_is_alone_has_the_whole_batch() -> None:
    driver = Driver(max_batch_seqs=4, num_pages=1000)
    for request in flood(20):
        driver.add(request)
    driver.step()
    assert running(driver) == ["hostile"] * 4
    driver.finish()
    assert driver.engine.scheduler.counters.preemptions == 0


def test_sequence_of_higher_priority_gives_up_no_seat() -> None:
    driver = Driver(max_batch_seqs=2, num_pages=1000)
    for number in range(2):
        driver.add(make_request(100 + number, [number] * 4, max_tokens=10, tenant="urgent", priority=-1))
    driver.step()
    driver.add(make_request(1, [1] * 4, max_tokens=2, tenant="polite"))
    driver.step()
    assert running(driver) == ["urgent"] * 2
    driver.finish()


@pytest.mark.parametrize(
    ("budget", "wanted", "given"),
    [
        (100, {"a": 1000}, {"a": 100}),
        (100, {"a": 1000, "b": 1000}, {"a": 50, "b": 50}),
        (100, {"a": 1000, "b": 10}, {"a": 90, "b": 10}),
        (100, {"a": 1000, "b": 10, "c": 80}, {"a": 45, "b": 10, "c": 45}),
        (1, {"a": 5, "b": 5}, {"a": 1, "b": 1}),
    ],
)
def test_budget_is_divided_by_what_is_wanted(budget: int, wanted: dict[str, int], given: dict[str, int]) -> None:
    """Nobody gets nothing; the step's own budget sees to the rest."""
    assert divide(budget, wanted) == given

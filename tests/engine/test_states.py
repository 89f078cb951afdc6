"""Recurrent states beside pages, on the fake runner: its tokens depend on a hash of all earlier ones that only a
sequence's slot holds.
"""

from collections.abc import Sequence

import pytest
from engine_driver import Driver, Outcome, make_request
from test_oracles import VOCABULARY, Outcomes, mixed_requests

from ostro.backends.fake import FakeRunner
from ostro.engine.batch import Batch
from ostro.engine.core import EngineCore
from ostro.engine.request import Task
from ostro.engine.runner import Step
from ostro.engine.states import Spacing

PROMPT = tuple(i * i % 997 for i in range(6000))
NONE_BETWEEN = Spacing(prompt=1_000_000, output=1_000_000)


def cached(driver: Driver, prompt: Sequence[int], *, id: int = 99, anchors: Sequence[int] = ()) -> int:
    """How many tokens of a prompt come from the cache; checks its outcome too."""
    before = driver.engine.scheduler.counters.cache_hits
    request = make_request(id, prompt, anchors=anchors)
    driver.run(request)
    driver.check_outcomes(request)
    return driver.engine.scheduler.counters.cache_hits - before


def captured(driver: Driver) -> list[int]:
    """Positions that were captured, in order."""
    chunks = [chunk for batch in driver.runner.batches for chunk in batch.chunks]
    return [chunk.start + offset for chunk in chunks for offset, _ in chunk.captures]


# ---- the oracles


@pytest.fixture
def alone() -> Outcomes:
    """What each of the mixed requests is given by an engine of its own that has room for everything."""
    outcomes: Outcomes = {}
    for request in mixed_requests():
        driver = Driver(vocab_size=VOCABULARY, num_states=100)
        driver.run(request)
        driver.check_outcomes(request)
        outcomes |= driver.outcomes
    return outcomes


@pytest.mark.parametrize("num_states", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_alone_equals_batched_with_any_number_of_slots(alone: Outcomes, num_states: int, steps_ahead: int) -> None:
    driver = Driver(vocab_size=VOCABULARY, num_pages=500, num_states=num_states, steps_ahead=steps_ahead)
    driver.run(*mixed_requests())
    assert driver.outcomes == alone
    assert max(len(batch.chunks) for batch in driver.runner.batches) <= num_states


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 5, 8])
def test_whole_equals_chunked(alone: Outcomes, max_batch_tokens: int) -> None:
    driver = Driver(vocab_size=VOCABULARY, max_batch_tokens=max_batch_tokens, num_states=20, spacing=Spacing(4, 4))
    driver.run(*mixed_requests())
    assert driver.outcomes == alone


@pytest.mark.parametrize("num_pages", [13, 14, 17, 20])
@pytest.mark.parametrize("spacing", [Spacing(), Spacing(4, 4)])
def test_unpreempted_equals_preempted(alone: Outcomes, num_pages: int, spacing: Spacing) -> None:
    driver = Driver(vocab_size=VOCABULARY, num_pages=num_pages, num_states=30, spacing=spacing)
    driver.run(*mixed_requests())
    assert driver.outcomes == alone
    assert driver.engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_with_drafts_equals_without(alone: Outcomes, accuracy: float) -> None:
    driver = Driver(
        vocab_size=VOCABULARY,
        num_states=9,
        spacing=Spacing(4, 4),
        max_sampled=64,
        accuracy=accuracy,
        patience=0.5,
        steps_ahead=1,
    )
    driver.run(*mixed_requests())
    assert driver.outcomes == alone
    assert driver.engine.scheduler.counters.drafted_tokens > 0


@pytest.mark.parametrize("max_batch_tokens", [3, 512])
def test_a_hit_at_each_snapshot_equals_cold(max_batch_tokens: int) -> None:
    for shared in range(41):
        driver = Driver(num_states=20, spacing=Spacing(prompt=4), max_batch_tokens=max_batch_tokens)
        driver.run(make_request(1, PROMPT[:41]))
        assert cached(driver, (*PROMPT[:shared], *range(50, 60))) == shared // 4 * 4


def test_an_answer_fed_back_as_a_prompt_equals_cold() -> None:
    driver = Driver(page_size=16, num_pages=200, num_states=8)
    driver.run(make_request(1, PROMPT[:100], max_tokens=700))
    assert driver.engine.scheduler.kv.usage.snapshots == 3
    turn = (*PROMPT[:100], *driver.outcomes[1, 0].token_ids, *range(30))
    # The output's snapshots follow it, 256 tokens apart or a little more.
    assert cached(driver, turn) == 624


# ---- where snapshots are


def test_a_prompt_leaves_one_at_its_last_page_and_one_at_the_page_before() -> None:
    driver = Driver(num_states=8)
    driver.run(make_request(1, PROMPT[:18]))
    assert captured(driver) == [12, 16]
    # A hit leaves a token to compute, so the last page is of use to a longer prompt only.
    assert cached(driver, PROMPT[:16]) == 12
    assert cached(driver, PROMPT[:17]) == 16


def test_where_prompts_part_the_second_leaves_one_for_the_third() -> None:
    driver = Driver(num_states=8, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:42]))
    assert cached(driver, (*PROMPT[:22], *range(20))) == 0
    assert driver.engine.scheduler.counters.stateless_tokens == 20
    assert cached(driver, (*PROMPT[:22], *range(100, 130))) == 20
    assert driver.engine.scheduler.counters.stateless_tokens == 20


def test_ends_of_messages_are_hit_though_the_next_turn_renders_the_end_otherwise() -> None:
    driver = Driver(num_states=8, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:60], anchors=(3, 10, 21, 41)))
    assert captured(driver) == [8, 20, 40]
    assert cached(driver, (*PROMPT[:41], *range(40)), id=2, anchors=(41, 60)) == 40
    assert cached(driver, (*PROMPT[:21], *range(500, 540)), id=3) == 20


def test_each_turn_of_a_chat_finds_the_last_though_its_template_strips_thinking() -> None:
    """Eight turns; 900 ends a message, 901 begins an answer and 902 its thinking, which the next prompt is without."""
    driver = Driver(page_size=16, num_pages=400, num_states=12, steps_ahead=1)
    history = [*PROMPT[:150], 900]
    for turn in range(8):
        question = [*PROMPT[200 + 40 * turn : 240 + 40 * turn], 900]
        prompt = [*history, *question, 901, 902]
        request = make_request(turn, prompt, max_tokens=60, eos_ids=(900,))
        before = driver.engine.scheduler.counters.cache_hits
        driver.run(request)
        driver.check_outcomes(request)
        computed = len(prompt) - (driver.engine.scheduler.counters.cache_hits - before)
        answer = [901, *PROMPT[700 + turn : 730 + turn], 900]
        # The last turn's answer, as history has it, and this turn's question.
        assert not turn or computed <= len(answer) + len(question) + 2 + 16
        history += [*question, *answer]


def test_no_more_than_the_last_four_ends_of_messages_count() -> None:
    driver = Driver(num_states=8, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:60], anchors=range(4, 60, 8)))
    assert captured(driver) == [28, 36, 44, 52]


def test_an_edit_in_a_long_prompt_costs_2048_tokens_at_most() -> None:
    driver = Driver(page_size=16, num_pages=1000, max_seq_len=8000, num_states=8)
    driver.run(make_request(1, PROMPT[:5000]))
    assert captured(driver) == [2048, 4096, 4976, 4992]
    assert cached(driver, (*PROMPT[:4500], *range(300))) == 4096
    assert cached(driver, (*PROMPT[:2100], *range(300)), id=100) == 2048


def test_one_snapshot_follows_an_output() -> None:
    driver = Driver(num_states=3, spacing=Spacing(output=8), num_pages=100)
    driver.run(make_request(1, PROMPT[:3], max_tokens=60))
    assert captured(driver) == [12, 20, 28, 36, 44, 52, 60]
    assert driver.engine.scheduler.kv.usage.snapshots == 1


def test_states_are_captured_at_multiples_of_what_the_runner_says() -> None:
    driver = Driver(num_states=8, state_every=6)
    driver.run(make_request(1, PROMPT[:40], max_tokens=2))
    assert captured(driver) == [24, 36]


@pytest.mark.parametrize("task", [Task.EMBED, Task.GENERATE])
def test_where_nobody_will_look_no_snapshot_is_taken(task: Task) -> None:
    driver = Driver(num_states=8, prefix_caching=task is Task.EMBED)
    request = make_request(1, PROMPT[:40], task=task, max_tokens=0 if task is Task.EMBED else 4)
    driver.run(request)
    driver.check_outcomes(request)
    assert captured(driver) == []


# ---- slots that run out


def test_without_a_slot_the_capture_is_skipped_and_not_the_chunk() -> None:
    driver = Driver(num_states=1)
    request = make_request(1, PROMPT[:40], n=3)
    driver.run(request)
    driver.check_outcomes(request)
    assert captured(driver) == []


def test_the_last_snapshot_moves_into_the_sequence_that_needs_it() -> None:
    driver = Driver(num_states=2, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:10]))
    assert captured(driver) == [4]
    driver.add(make_request(2, PROMPT[100:103], max_tokens=30))
    driver.step()
    assert cached(driver, (*PROMPT[:6], 1, 2), id=3) == 4
    assert not any(batch.state_copies for batch in driver.runner.batches)


def test_a_choice_without_a_slot_waits() -> None:
    driver = Driver(num_states=3)
    request = make_request(1, PROMPT[:22], n=6, max_tokens=9)
    driver.run(request)
    driver.check_outcomes(request)
    assert [len(batch.chunks) for batch in driver.runner.batches[:2]] == [1, 3]
    assert max(len(batch.chunks) for batch in driver.runner.batches) == 3


def test_a_snapshot_that_many_use_outlives_a_long_prompt() -> None:
    driver = Driver(num_states=6, num_pages=600, max_batch_tokens=50, spacing=Spacing(prompt=40))
    system = PROMPT[:20]
    for id in range(8):
        driver.run(make_request(id, (*system, *range(20 * id, 20 * id + 6)), max_tokens=1, anchors=(20,)))
    driver.run(make_request(50, PROMPT[1000:1500], max_tokens=1))
    assert len(captured(driver)) > 12
    assert cached(driver, (*system, 900, 901)) == 20


def test_of_unlike_snapshots_the_one_that_saves_least_goes_first() -> None:
    driver = Driver(num_states=3, num_pages=200, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:201], max_tokens=1, anchors=(200,)))
    driver.run(make_request(2, PROMPT[500:509], max_tokens=1, anchors=(8,)))
    driver.run(make_request(3, PROMPT[700:741], max_tokens=1, anchors=(40,)))
    kv = driver.engine.scheduler.kv
    found = [kv.num_found(list(PROMPT[start : start + 300]), "") for start in (0, 500, 700)]
    assert found == [200, 0, 40]


def test_pages_behind_the_last_state_are_evicted_before_all_others() -> None:
    driver = Driver(num_states=4, num_pages=16, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:25], max_tokens=1, anchors=(24,)))
    driver.run(make_request(2, PROMPT[100:125], max_tokens=1, anchors=(8,)))
    driver.run(make_request(3, PROMPT[200:225], max_tokens=1, anchors=(24,)))
    kv = driver.engine.scheduler.kv
    # The second prompt's last pages went, though the first's were older.
    assert [kv.num_found(list(PROMPT[start : start + 25]), "") for start in (0, 100, 200)] == [24, 8, 24]


def test_a_page_that_is_evicted_takes_its_state_along() -> None:
    driver = Driver(num_states=4, num_pages=8)
    driver.run(make_request(1, PROMPT[:25], max_tokens=1))
    assert driver.engine.scheduler.kv.usage.snapshots == 2
    driver.run(make_request(2, PROMPT[100:130], max_tokens=1))
    assert driver.engine.scheduler.kv.usage.snapshots == 2
    assert cached(driver, PROMPT[:25]) == 0


# ---- waiting for a state, preemption, failures


def test_a_request_waits_for_a_state_that_another_is_about_to_leave() -> None:
    driver = Driver(num_states=8)
    driver.run(make_request(1, PROMPT[:30]), make_request(2, PROMPT[:30]))
    driver.check_outcomes(make_request(1, PROMPT[:30]), make_request(2, PROMPT[:30]))
    assert [len(batch.chunks) for batch in driver.runner.batches[:2]] == [1, 2]
    assert driver.engine.scheduler.counters.cache_hits == 28


def test_a_request_does_not_wait_for_a_page_without_a_state() -> None:
    driver = Driver(num_states=8, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:30]), make_request(2, (*PROMPT[:20], *range(9))))
    assert len(driver.runner.batches[0].chunks) == 2


def test_a_preempted_sequence_continues_from_its_outputs_last_snapshot() -> None:
    driver = Driver(num_states=6, num_pages=16, spacing=Spacing(output=16))
    requests = [make_request(id, PROMPT[10 * id : 10 * id + 6], max_tokens=34 + 16 * id) for id in range(2)]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    assert driver.engine.scheduler.counters.preemptions > 0
    ends: dict[int, int] = {}
    resumed = []
    for chunk in (chunk for batch in driver.runner.batches for chunk in batch.chunks):
        if chunk.start < ends.get(chunk.seq.id, 0):
            resumed.append(chunk.start)
        ends[chunk.seq.id] = chunk.end
    assert resumed == [24]


def test_pages_that_are_computed_again_are_kept_once() -> None:
    driver = Driver(num_states=8, num_pages=30, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:40], max_tokens=1))
    pages = driver.engine.scheduler.kv.usage.cached
    driver.run(make_request(2, (*PROMPT[:24], 1), max_tokens=1))
    assert driver.engine.scheduler.counters.stateless_tokens == 24
    assert driver.engine.scheduler.kv.usage.cached == pages


class FailingOnce(FakeRunner):
    def __init__(self) -> None:
        super().__init__(num_states=8)
        self.fails_at = -1

    def launch(self, batch: Batch) -> Step:
        self.fails_at -= 1
        if not self.fails_at:
            raise RuntimeError("the device is gone")
        return super().launch(batch)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failed_step_leaves_no_snapshot_and_loses_no_slot(fails_at: int) -> None:
    runner = FailingOnce()
    engine = EngineCore(runner)
    engine.add(make_request(1, PROMPT[:40]))
    while engine.has_work:
        engine.step()
    runner.fails_at = fails_at
    engine.add(make_request(2, PROMPT[:50], n=2))
    for _ in range(fails_at - 1):
        engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    engine.check_integrity()
    usage = engine.scheduler.kv.usage
    assert (usage.states_free, usage.snapshots) == (8, 0)


def test_what_is_found_ends_at_a_state() -> None:
    driver = Driver(num_states=8, spacing=NONE_BETWEEN)
    driver.run(make_request(1, PROMPT[:40], anchors=(22,)))
    assert driver.engine.num_found(PROMPT[:40]) == 20
    driver.engine.scheduler.kv.clear_cache()
    assert driver.engine.num_found(PROMPT[:40]) == 0
    assert driver.engine.scheduler.kv.usage.states_free == 8


# ---- the fake runner's states


@pytest.mark.parametrize("mistake", ["stale", "another's", "empty"])
def test_a_wrong_state_changes_the_fake_runners_tokens(mistake: str) -> None:
    driver = Driver(num_states=2, spacing=NONE_BETWEEN)
    driver.add(make_request(1, PROMPT[:9], max_tokens=8))
    for _ in range(3):
        driver.step()
    kept = driver.runner.fake.read_state(0)
    driver.step()
    if mistake == "another's":
        driver.add(make_request(2, PROMPT[20:28], max_tokens=0))
        driver.step()
    driver.runner.fake.write_state(0, {"stale": kept, "another's": driver.runner.fake.read_state(1)}.get(mistake))
    driver.finish()
    given, expected = driver.outcomes[1, 0], driver.expected(make_request(1, PROMPT[:9], max_tokens=8))
    assert isinstance(given, Outcome)
    assert given.token_ids[:4] == expected.token_ids[:4]
    assert given.token_ids != expected.token_ids

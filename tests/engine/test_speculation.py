"""Drafted tokens: what steps they save, when they are made, and that they change nothing."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import pytest
from engine_driver import Driver, make_request
from guessed_drafts import EagerDrafts
from hypothesis import given
from hypothesis import strategies as st
from scripted_grammar import scripted

from ostro.backends.fake import FakeRunner, Script
from ostro.engine.core import EngineCore
from ostro.engine.costs import StepCosts
from ostro.engine.drafter import LONGEST_MATCH, MOST_DRAFTS, TextIndex
from ostro.engine.request import Request
from ostro.engine.runner import RunnerSpec
from ostro.engine.scheduler import Progress
from ostro.engine.sequence import FinishReason, Sequence
from ostro.engine.speculation import NgramSpeculation, speculation
from ostro.sampling_params import SamplingParams

TEXT = [*range(20, 60), *range(100, 130)]


drafting = partial(Driver, max_sampled=64)


def num_drafted(driver: Driver) -> list[int]:
    return [sum(len(chunk.drafts) for chunk in batch.chunks) for batch in driver.runner.batches]


# --- what steps they save


def test_drafts_that_are_right_save_steps() -> None:
    driver, request = drafting(accuracy=1.0), make_request(1, (1, 2, 3), max_tokens=40)
    driver.run(request)
    driver.check_outcomes(request)
    counters = driver.engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 20
    assert counters.steps == 40 - counters.accepted_tokens
    assert counters.generated_tokens == 40


def test_drafts_that_are_wrong_save_none_and_change_nothing() -> None:
    driver, request = drafting(accuracy=0.0), make_request(1, (1, 2, 3), max_tokens=20)
    driver.run(request)
    driver.check_outcomes(request)
    counters = driver.engine.scheduler.counters
    assert counters.drafted_tokens > 20
    assert (counters.accepted_tokens, counters.steps) == (0, 20)
    assert counters.computed_tokens == 3 + 20 - 1, "what is rejected does not count"


def test_tokens_after_a_stop_token_are_dropped() -> None:
    alone = Driver()
    alone.run(make_request(1, (1, 2, 3), max_tokens=40))
    stop = alone.outcomes[1, 0].token_ids[17]
    driver, request = drafting(accuracy=1.0), make_request(1, (1, 2, 3), max_tokens=40, stop_token_ids=(stop,))
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.outcomes[1, 0].finish_reason is FinishReason.STOP
    assert max(num_drafted(driver)) > 1


def test_accepted_tokens_are_found_in_the_prefix_cache_later() -> None:
    driver = drafting(accuracy=0.7)
    driver.run(make_request(1, (1, 2, 3, 4), max_tokens=30))
    whole = (1, 2, 3, 4, *driver.outcomes[1, 0].token_ids)
    later = make_request(2, whole, max_tokens=8)
    driver.run(later)
    driver.check_outcomes(later)
    # The last token was never computed.
    assert driver.engine.scheduler.counters.cache_hits >= len(whole) - 1 - driver.runner.spec.page_size


def test_a_device_fed_one_step_ahead_waits_for_what_it_verifies() -> None:
    """The results of a step with drafts decide what follows: the sequence joins no step before it has them."""
    driver = drafting(accuracy=1.0, steps_ahead=1)
    # A sequence drafts if its last token is known; one with such a ban always waits for it.
    waiting = replace(make_request(1, (1, 2, 3), max_tokens=30), bad_word_ids=((5, 6),))
    going = make_request(2, (4, 5), max_tokens=30)
    driver.run(waiting, going)
    driver.check_outcomes(waiting, going)
    counters = driver.engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 10
    drafting_ids = {chunk.seq.request.id for batch in driver.runner.batches for chunk in batch.chunks if chunk.drafts}
    # The other one waits with it, and so knows its last token too.
    assert drafting_ids == {1, 2}


def test_a_device_fed_one_step_ahead_waits_where_drafts_are_worth_it() -> None:
    """Drafts can only follow tokens that are known: the next step waits for the results of the one under way."""
    driver = drafting(accuracy=1.0, steps_ahead=1, patience=1.0)
    requests = [make_request(id, (id, 2, 3), max_tokens=40) for id in range(3)]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    counters = driver.engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 60
    assert counters.steps < 40, "sequences with and without drafts share their steps"
    assert counters.computed_tokens == 3 * (3 + 40 - 1)


def test_no_prompt_waits_for_drafts() -> None:
    driver = drafting(accuracy=1.0, steps_ahead=1, patience=1.0)
    driver.add(make_request(1, (1, 2, 3), max_tokens=40))
    for _ in range(5):
        driver.step()
    driver.add(make_request(2, (4, 5, 6), max_tokens=1))
    before = len(driver.runner.batches)
    driver.step()
    assert [chunk.seq.request.id for chunk in driver.runner.batches[before].chunks][-1] == 2


def test_an_answer_that_repeats_nothing_lets_the_device_run_ahead() -> None:
    answer = [200 + at * 7 % 311 for at in range(len(TEXT))]
    engine, calls = EngineCore(answering(answer, steps_ahead=1), speculation=EagerDrafts()), 0
    engine.add(edit_request())
    while engine.has_work:
        engine.step()
        calls += 1
    # Each call launches a step and takes in the one before it, unless it waits.
    assert calls < 1.2 * engine.scheduler.counters.steps


def test_an_answer_that_repeats_its_prompt_is_worth_waiting_for() -> None:
    edited = [*TEXT[:20], 999, *TEXT[21:]]
    gains, engine = run(answering(edited, steps_ahead=1), EagerDrafts(), edit_request())
    assert [token for gain in gains for token in gain.token_ids] == edited
    assert engine.scheduler.counters.steps < len(edited) / 3


def test_a_sequence_that_drafts_is_not_run_ahead_of_its_results() -> None:
    """The second choice waits for a seat, finds its prompt in the cache, and knows its last token when it begins."""
    driver = drafting(accuracy=1.0, steps_ahead=1, page_size=1, max_batch_seqs=1)
    request = make_request(1, (1, 2, 3), max_tokens=40, n=2)
    driver.run(request)
    driver.check_outcomes(request)
    counters = driver.engine.scheduler.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 10


# --- when they are made


def test_a_runner_that_verifies_nothing_is_given_no_drafts() -> None:
    driver = Driver(accuracy=1.0)
    driver.run(make_request(1, (1, 2, 3), max_tokens=8))
    assert not any(num_drafted(driver))


def test_nobody_drafts_while_a_prompt_is_computed() -> None:
    driver = drafting(accuracy=1.0, max_batch_tokens=8, num_pages=128)
    driver.add(make_request(1, (1, 2, 3), max_tokens=200))
    for _ in range(4):
        driver.step()
    driver.add(make_request(2, tuple(range(60)), max_tokens=1))
    driver.finish()
    reading = [batch for batch in driver.runner.batches if any(chunk.length > 1 for chunk in batch.chunks)]
    assert len(reading) > 8
    assert not any(chunk.drafts for batch in reading for chunk in batch.chunks)
    assert any(num_drafted(driver))


def test_others_draft_while_forced_tokens_are_computed() -> None:
    """A chunk of several tokens that a structure forces was taken for a prompt."""
    driver = drafting(accuracy=1.0)
    forced = scripted({0: {5: 1, 6: 1}, 1: {7: 2}, 2: {8: 0}}, jump_forward=True)
    jumping = make_request(1, (1, 2, 3), max_tokens=40, constraint=forced)
    free = make_request(2, (4, 5), max_tokens=200)
    driver.run(jumping, free)
    driver.check_outcomes(jumping, free)
    beside = [batch for batch in driver.runner.batches[1:] if any(chunk.length > 1 for chunk in batch.chunks)]
    assert beside
    assert any(chunk.drafts for batch in beside for chunk in batch.chunks)


def test_drafts_stay_within_the_budget_and_the_rows_that_the_runner_samples() -> None:
    driver = drafting(accuracy=0.5, max_batch_tokens=7, max_sampled=5)
    requests = [make_request(id, (id, 1), max_tokens=20) for id in range(3)]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    crowded = [batch for batch in driver.runner.batches if len(batch.chunks) == 3]
    assert max(sum(len(chunk.drafts) for chunk in batch.chunks) for batch in crowded) == 2, "three of five are taken"


def test_no_sequence_loses_pages_to_drafts() -> None:
    driver = drafting(accuracy=1.0, page_size=1, num_pages=24)
    requests = [make_request(id, (id,), max_tokens=11) for id in range(2)]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    assert driver.engine.scheduler.counters.preemptions == 0
    assert any(num_drafted(driver))


# --- n-grams


def fake(*, vocab_size: int = 1000, steps_ahead: int = 0, scripts: Seq[Script] = ()) -> FakeRunner:
    return FakeRunner(
        num_pages=256,
        max_seq_len=1000,
        vocab_size=vocab_size,
        max_sampled=64,
        steps_ahead=steps_ahead,
        scripts=scripts,
    )


def answering(answer: list[int], key: int = 7, *, steps_ahead: int = 0) -> FakeRunner:
    """A runner that answers prompts which contain the key."""
    return fake(scripts=[Script([key], [answer])], steps_ahead=steps_ahead)


DEAR_ROWS = {rows: float(rows) for rows in (1, 2, 4, 8, 16)}


def run(runner: FakeRunner, drafts: NgramSpeculation | None, *requests: Request) -> tuple[list[Progress], EngineCore]:
    engine = EngineCore(runner, speculation=drafts)
    for request in requests:
        engine.add(request)
    gains = []
    while engine.has_work:
        gains += engine.step()
        engine.check_integrity()
    return gains, engine


def edit_request(id: int = 1, *, prompt: Seq[int] = (7, *TEXT, 8), predicted: Seq[int] = ()) -> Request:
    params = SamplingParams(max_tokens=len(TEXT), temperature=0)
    return Request(id=id, prompt_ids=tuple(prompt), params=params, seed=0, predicted_ids=tuple(predicted))


def test_an_answer_that_repeats_its_prompt_takes_a_fraction_of_the_steps() -> None:
    edited = [*TEXT[:20], 999, *TEXT[21:]]
    gains, engine = run(answering(edited), EagerDrafts(), edit_request())
    assert [token for gain in gains for token in gain.token_ids] == edited
    assert engine.scheduler.counters.steps < len(edited) / 3


def test_nothing_is_drafted_where_rows_are_dear() -> None:
    _, engine = run(answering(TEXT), EagerDrafts(DEAR_ROWS), edit_request())
    assert engine.scheduler.counters.drafted_tokens == 0


def test_next_to_nothing_is_drafted_for_an_answer_that_repeats_nothing() -> None:
    answer = [200 + at * 7 % 311 for at in range(len(TEXT))]
    _, engine = run(answering(answer), EagerDrafts(), edit_request())
    assert engine.scheduler.counters.drafted_tokens < 10


def test_a_sequence_whose_guesses_are_wrong_stops_drafting() -> None:
    """Pairs repeat and what follows them never does: the rate of short matches sinks until they are not worth a row."""
    answer = [token for at in range(100) for token in (300, 301, 400 + at)]
    params = SamplingParams(max_tokens=len(answer), temperature=0)
    request = Request(id=1, prompt_ids=(7,), params=params, seed=0)
    moderate = {rows: 1.0 + 0.15 * rows for rows in (1, 2, 4, 8, 16)}
    gains, engine = run(answering(answer), EagerDrafts(moderate), request)
    assert [token for gain in gains for token in gain.token_ids] == answer
    assert engine.scheduler.counters.drafted_tokens - engine.scheduler.counters.accepted_tokens < 30


def test_a_predicted_text_is_drafted_from_its_beginning() -> None:
    gains, engine = run(answering(TEXT), EagerDrafts(), edit_request(prompt=(7, 8), predicted=TEXT))
    assert [token for gain in gains for token in gain.token_ids] == TEXT
    assert engine.scheduler.counters.steps < len(TEXT) / 3
    assert sum(gain.num_accepted for gain in gains) == engine.scheduler.counters.accepted_tokens > 40
    assert sum(gain.num_predicted for gain in gains) == engine.scheduler.counters.drafted_tokens


def test_a_predicted_text_that_is_wrong_changes_nothing() -> None:
    gains, _ = run(answering(TEXT), EagerDrafts(), edit_request(prompt=(7, 8), predicted=[*range(500, 560)]))
    assert [token for gain in gains for token in gain.token_ids] == TEXT
    assert sum(gain.num_accepted for gain in gains) == 0


def test_choices_draft_each_for_itself() -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, n=3, seed=1)
    request = Request(id=1, prompt_ids=(0, 1, 2, 0, 1), params=params, seed=1, predicted_ids=(2, 2, 1, 0, 0, 1))
    with_drafts, engine = run(fake(vocab_size=3), EagerDrafts(), request)
    without, _ = run(fake(vocab_size=3), None, request)
    for choice in range(3):
        told = [
            [token for gain in gains if gain.choice == choice for token in gain.token_ids]
            for gains in (with_drafts, without)
        ]
        assert told[0] == told[1]
    assert engine.scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize(
    ("setting", "is_invariant", "max_sampled", "drafts"),
    [
        ("auto", True, 8, True),
        ("auto", False, 8, False),
        ("ngram", False, 8, True),
        ("ngram", True, 0, False),
        ("off", True, 8, False),
    ],
)
def test_the_setting_and_the_runner_decide(setting: str, is_invariant: bool, max_sampled: int, drafts: bool) -> None:
    spec = RunnerSpec(
        page_size=4, num_pages=4, max_seq_len=16, vocab_size=9, is_invariant=is_invariant, max_sampled=max_sampled
    )
    assert (speculation(setting, spec) is not None) == drafts


def test_a_sequence_with_supposed_tokens_leaves_the_original_alone() -> None:
    seq = Sequence(1, edit_request(), max_len=100)
    twin = seq.supposing((5, 6))
    assert twin.token_ids == [*seq.token_ids, 5, 6]
    assert (seq.num_output, twin.num_output) == (0, 2)


# --- looking up


def longest(text: list[int], end: int) -> int:
    """The longest match of the end of a text within what comes before it, by brute force."""
    best = 0
    for at in range(2, end):
        length = 0
        while length < min(at, LONGEST_MATCH) and text[at - 1 - length] == text[end - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= 2 else 0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 7))
def test_a_match_that_is_found_is_one_and_the_latest_eight_hold_the_longest(text: list[int], stride: int) -> None:
    index = TextIndex(text)
    for end in range(2, len(text) + 1, stride):
        index.grow(end - 1)
        match = index.find(text, end)
        assert (match is not None) == (longest(text, end) > 0)
        if match is None:
            continue
        assert text[match.end - match.length : match.end] == text[end - match.length : end]
        pair = text[end - 2 : end]
        occurrences = [at for at in range(2, end) if text[at - 2 : at] == pair]
        assert match.end in occurrences[-8:]
        if len(occurrences) <= 8:
            assert match.length == longest(text, end)


def test_a_long_prompt_is_indexed_in_parts_and_no_further_back_than_its_bound() -> None:
    text = [*range(1000, 1010), *range(40_000), *range(1000, 1010)]
    index = TextIndex(text)
    index.grow(len(text) - 1)
    assert index.find(text, len(text)) is None
    for _ in range(20):
        index.grow(len(text) - 1)
    found = index.find([*range(39_990, 40_000)], 10)
    assert found is not None
    assert (found.length, text[found.end]) == (10, 1000)
    # The same numbers, which begin the text, are beyond its bound.
    early = index.find([1003, 1004], 2)
    assert early is None or early.end > len(text) - 33_000


# --- costs


def test_costs_are_those_of_the_steps_that_were_seen() -> None:
    costs = StepCosts()
    for _ in range(200):
        for rows, seconds in ((1, 0.010), (4, 0.013), (8, 0.020)):
            costs.note(rows, seconds)
    assert costs.of(4) / costs.of(1) == pytest.approx(1.3, rel=0.02)
    assert costs.of(8) / costs.of(1) == pytest.approx(2.0, rel=0.02)
    assert costs.of(6) / costs.of(1) == pytest.approx(1.65, rel=0.02)
    # Beyond what was seen: on the line from one row to eight.
    assert costs.of(15) / costs.of(1) == pytest.approx(3.0, rel=0.02)


def test_the_first_step_of_its_rows_counts_half_if_it_was_disturbed() -> None:
    """A disturbed one was taken for the cost of so many rows, and with nothing drafted no other followed for long."""
    costs = StepCosts()
    for _ in range(20):
        costs.note(1, 0.010)
    expected = costs.of(4) / costs.of(1)
    costs.note(4, 5.0)
    assert costs.of(4) / costs.of(1) <= 1.6 * expected


def test_a_step_that_was_disturbed_hardly_counts() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.note(1, 0.010)
        costs.note(8, 0.020)
    costs.note(8, 5.0)
    assert costs.of(8) / costs.of(1) < 2.5


def test_a_machine_that_becomes_slower_changes_no_ratio() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.note(1, 0.010)
        costs.note(8, 0.020)
    for _ in range(100):
        costs.note(8, 0.060)
    assert costs.of(8) / costs.of(1) == pytest.approx(2.0, rel=0.25)


def test_high_step_costs_are_eventually_forgotten() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.note(1, 0.010)
        costs.note(2, 0.020)
    assert costs.of(2) / costs.of(1) == pytest.approx(2.0, rel=0.02)
    for _ in range(1000):
        costs.note(1, 0.010)
    assert costs.of(2) / costs.of(1) < 1.5


def test_a_guess_is_never_longer_than_a_runner_is_asked_to_verify() -> None:
    _, engine = run(answering(TEXT), EagerDrafts(), edit_request())
    assert engine.scheduler.counters.accepted_tokens <= MOST_DRAFTS * engine.scheduler.counters.steps

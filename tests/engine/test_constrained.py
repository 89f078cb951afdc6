"""Requests whose output must match a grammar: how they begin, go on and end. Schedules are for `test_oracles`."""

from dataclasses import replace
from typing import Any

import pytest
from engine_driver import Driver, make_request
from scripted_grammar import EOS, ScriptedGrammars, scripted

from ostro.engine.constraint import Constraint
from ostro.engine.request import Request, Task
from ostro.engine.sequence import FinishReason, Sequence
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams

# 10 or 11, then forced 20 21 22, then 30 or 31, and done.
CALL = {0: {10: 1, 11: 1}, 1: {20: 2}, 2: {21: 3}, 3: {22: 4}, 4: {30: 5, 31: 5}}
# Any number of pairs, and an end after each.
PAIRS = {0: {40: 1, 41: 1}, 1: {50: 0, 51: 0}}


def call(jump_forward: bool = False) -> Constraint:
    return scripted(CALL, jump_forward=jump_forward)


def constrained(id: int, constraint: Constraint, max_tokens: int | None = 20, **settings: Any) -> Request:
    return make_request(id, range(10), max_tokens=max_tokens, eos_ids=(EOS,), constraint=constraint, **settings)


def tokens_of(driver: Driver, id: int, choice: int = 0) -> list[int]:
    return driver.outcomes[id, choice].token_ids


@pytest.mark.parametrize("jump_forward", [False, True])
@pytest.mark.parametrize(("steps_ahead", "masks_late"), [(0, False), (1, False), (1, True)])
def test_a_complete_structure_ends_with_stop_and_without_an_end_token(
    jump_forward: bool, steps_ahead: int, masks_late: bool
) -> None:
    driver = Driver(steps_ahead=steps_ahead, masks_late=masks_late)
    request = constrained(1, call(jump_forward), n=3)
    driver.run(request)
    driver.check_outcomes(request)
    for choice in range(3):
        first, *middle, last = tokens_of(driver, 1, choice)
        assert (first in (10, 11), middle, last in (30, 31)) == (True, [20, 21, 22], True)
        assert driver.outcomes[1, choice].finish_reason is FinishReason.STOP


def test_an_output_may_end_only_where_its_grammar_lets_it() -> None:
    driver = Driver(vocab_size=60)
    requests = [constrained(id, scripted(PAIRS, ends=(0,)), max_tokens=3) for id in range(20)]
    driver.run(*requests)
    ends = {driver.outcomes[request.id, 0].finish_reason for request in requests}
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}
    for request in requests:
        tokens = tokens_of(driver, request.id)
        assert EOS not in tokens[:-1]
        assert EOS not in tokens or len(tokens) % 2 == 1


def test_a_stop_token_of_the_request_ends_the_output_where_the_grammar_may_end() -> None:
    driver = Driver(vocab_size=60)
    requests = [constrained(id, scripted(PAIRS, ends=(0,)), stop_token_ids=(7,), max_tokens=40) for id in range(20)]
    driver.run(*requests)
    last = [tokens_of(driver, request.id)[-1] for request in requests]
    assert {EOS, 7} <= set(last)
    for request in requests:
        driver.check_outcomes(request)


@pytest.mark.parametrize("jump_forward", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_a_structure_that_max_tokens_cuts_off_ends_with_length(jump_forward: bool, max_tokens: int) -> None:
    driver = Driver()
    driver.run(constrained(1, call(jump_forward), max_tokens=max_tokens))
    assert len(tokens_of(driver, 1)) == max_tokens
    assert driver.outcomes[1, 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("jump_forward", [False, True])
def test_a_structure_that_is_complete_at_max_tokens_ends_with_stop(jump_forward: bool) -> None:
    driver = Driver()
    driver.run(constrained(1, call(jump_forward), max_tokens=5))
    assert driver.outcomes[1, 0].finish_reason is FinishReason.STOP


def test_a_matcher_that_fails_ends_its_own_choice_with_an_error() -> None:
    driver = Driver()
    trapped, fine = constrained(1, scripted(CALL, traps=(3,))), constrained(2, call())
    driver.run(trapped, fine)
    assert driver.outcomes[1, 0].finish_reason is FinishReason.ERROR
    assert driver.outcomes[1, 0].error == "State 3 is a trap."
    driver.check_outcomes(fine)


def test_a_grammar_that_fails_before_its_first_token_is_refused() -> None:
    driver = Driver()
    with pytest.raises(BadRequest) as refusal:
        driver.add(constrained(1, scripted(CALL, traps=(0,))))
    assert refusal.value.param == "structured"
    assert not driver.engine.has_work


def test_tokens_are_free_where_the_grammar_says_so() -> None:
    driver = Driver(vocab_size=60)
    # Anything until 5, then 10 and the end.
    constraint = scripted({0: {5: 1}, 1: {10: 2}}, free=(0,))
    requests = [constrained(id, constraint, max_tokens=200) for id in range(20)]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    outputs = [tokens_of(driver, request.id) for request in requests]
    # Some ended while they were free.
    done = [tokens for tokens in outputs if tokens[-1] != EOS]
    assert 0 < len(done) < len(requests)
    assert all(tokens[-2:] == [5, 10] and 5 not in tokens[:-2] for tokens in done)
    assert len({token for tokens in outputs for token in tokens}) > 30


def test_a_constrained_row_waits_for_its_last_token_and_does_not_hold_up_others() -> None:
    driver = Driver(steps_ahead=1)
    driver.run(constrained(1, scripted(PAIRS), max_tokens=8), make_request(2, range(20, 30), max_tokens=8))
    together = [len(batch.chunks) for batch in driver.runner.batches]
    assert 1 in together
    assert 2 in together
    assert len(tokens_of(driver, 1)) == len(tokens_of(driver, 2)) == 8


def test_a_runner_that_takes_masks_late_has_a_constrained_row_in_every_step() -> None:
    driver = Driver(steps_ahead=1, masks_late=True)
    asked = constrained(1, scripted(PAIRS), max_tokens=8), make_request(2, range(20, 30), max_tokens=8)
    driver.run(*asked)
    driver.check_outcomes(*asked)
    assert {len(batch.chunks) for batch in driver.runner.batches} == {2}


@pytest.mark.parametrize(
    "changes", [{"constraint": scripted(PAIRS, jump_forward=True)}, {"params": SamplingParams(logit_bias={40: 1.0})}]
)
def test_a_row_that_lacks_more_than_its_mask_waits_all_the_same(changes: dict[str, Any]) -> None:
    driver = Driver(steps_ahead=1, masks_late=True)
    asked = replace(constrained(1, scripted(PAIRS), max_tokens=8), **changes), make_request(2, range(20, 30))
    driver.run(*asked)
    driver.check_outcomes(*asked)
    assert 1 in {len(batch.chunks) for batch in driver.runner.batches}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"params": SamplingParams(ignore_eos=True)}, "ignore_eos"),
        ({"params": SamplingParams(min_tokens=2)}, "min_tokens"),
        ({"task": Task.EMBED}, "structured"),
    ],
)
def test_what_contradicts_a_structure_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    driver = Driver()
    with pytest.raises(BadRequest) as refusal:
        driver.add(replace(constrained(1, call()), **changes))  # type: ignore[arg-type]
    assert refusal.value.param == param


# ---- jump-forward


def test_forced_tokens_take_no_steps_of_their_own() -> None:
    def steps(jump_forward: bool) -> int:
        driver = Driver()
        driver.run(constrained(1, call(jump_forward)))
        assert tokens_of(driver, 1)[1:4] == [20, 21, 22]
        assert driver.engine.scheduler.counters.generated_tokens == 5
        assert driver.engine.scheduler.counters.forced_tokens == (3 if jump_forward else 0)
        return driver.engine.scheduler.counters.steps

    assert (steps(jump_forward=False), steps(jump_forward=True)) == (5, 2)


def test_forced_tokens_at_the_beginning_are_computed_with_the_prompt() -> None:
    driver = Driver()
    request = constrained(1, scripted({0: {20: 1}, 1: {21: 2}, 2: {10: 3, 11: 3}}, jump_forward=True), n=2, logprobs=0)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.engine.scheduler.counters.steps == 1
    assert driver.engine.scheduler.counters.computed_tokens == 12


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_an_output_of_forced_tokens_alone_is_delivered(logprobs: int | None, n: int) -> None:
    driver = Driver()
    only = scripted({0: {20: 1}, 1: {21: 2}}, jump_forward=True)
    request = constrained(1, only, n=n, logprobs=logprobs)
    driver.run(request)
    driver.check_outcomes(request)
    assert [tokens_of(driver, 1, choice) for choice in range(n)] == [[20, 21]] * n


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 512])
def test_forced_tokens_have_the_models_own_log_probabilities_however_they_are_computed(max_batch_tokens: int) -> None:
    driver = Driver(max_batch_tokens=max_batch_tokens)
    request = constrained(1, call(jump_forward=True), logprobs=0, prompt_logprobs_from=4, n=2)
    driver.run(request)
    driver.check_outcomes(request)
    told = driver.outcomes[1, 0]
    assert [each.token_id for each in told.logprobs] == told.token_ids
    assert len(told.prompt_logprobs) == 6


def test_forced_tokens_at_the_end_come_with_their_log_probabilities() -> None:
    driver = Driver()
    closing = scripted({0: {10: 1, 11: 1}, 1: {20: 2}, 2: {21: 3}}, jump_forward=True)
    wanted, unwanted = constrained(1, closing, logprobs=0), constrained(2, closing)
    driver.run(wanted, unwanted)
    driver.check_outcomes(wanted, unwanted)
    assert driver.outcomes[1, 0].finish_reason is driver.outcomes[2, 0].finish_reason is FinishReason.STOP


def test_a_forced_token_that_is_a_stop_ends_the_output() -> None:
    driver = Driver()
    request = constrained(1, call(jump_forward=True), stop_token_ids=(21,))
    driver.run(request)
    assert tokens_of(driver, 1)[1:] == [20, 21]
    assert driver.outcomes[1, 0].finish_reason is FinishReason.STOP


# ---- loops


def endless(edges: dict[int, dict[int, int]], **settings: Any) -> Driver:
    driver = Driver(vocab_size=60, max_seq_len=3000, num_pages=800)
    driver.run(constrained(1, scripted(edges), max_tokens=None, **settings))
    return driver


@pytest.mark.full
def test_a_repetition_that_the_grammar_asks_for_is_no_loop() -> None:
    """One token again and again, with no other to choose."""
    table: dict[int, dict[int, int]] = {at: {20: at + 1} for at in range(1500)}
    driver = endless(table)
    assert len(tokens_of(driver, 1)) == 1500
    assert driver.outcomes[1, 0].finish_reason is FinishReason.STOP


def test_a_structure_may_repeat_itself_for_long() -> None:
    """A table of 100 zeros is no loop, though each could have been a one."""
    table: dict[int, dict[int, int]] = {at: {20: at + 1} if at % 2 else {21: at + 1, 22: at + 1} for at in range(300)}
    driver = endless(table, temperature=0.0)
    assert len(tokens_of(driver, 1)) == 300
    assert driver.outcomes[1, 0].finish_reason is FinishReason.STOP


def test_an_endless_structure_ends_once_it_has_looped_for_far_longer_than_free_text() -> None:
    def length(constraint: Constraint) -> int:
        request = constrained(1, constraint, max_tokens=None)
        seq = Sequence(1, request, max_len=10**6, matcher=ScriptedGrammars().prepare(constraint).start())
        while True:
            seq.expect()
            if seq.learn(20):
                return seq.num_output
            assert seq.follow(20) is None

    free, masked = length(scripted({0: {}}, free=(0,))), length(scripted({0: {20: 0, 21: 0}}))
    assert free < 100
    assert 5 * free < masked < 10 * free

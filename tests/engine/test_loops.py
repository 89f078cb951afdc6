"""Outputs that run in a loop are noticed at the token that completes it, and no others are."""

from collections.abc import Sequence

import pytest
from engine_driver import Driver, make_request
from hypothesis import example, given
from hypothesis import strategies as st

from ostro.engine.loops import MAX_PERIOD, MIN_REPEATS, MIN_TOKENS, LoopWatch
from ostro.engine.sequence import FinishReason

PROMPT = [7] * 200


def noticed(output: Sequence[int]) -> int | None:
    """Number of tokens after which a loop is noticed. The prompt is a loop of its own, unrelated to theirs."""
    watch, token_ids = LoopWatch(), list(PROMPT)
    for count, token in enumerate(output, 1):
        token_ids.append(token)
        if watch.take(token_ids, len(PROMPT), len(token_ids)):
            return count
    return None


def noticed_plainly(output: Sequence[int]) -> int | None:
    """The same by the definition, word for word."""
    for end in range(1, len(output) + 1):
        for period in range(1, MAX_PERIOD + 1):
            length = max(MIN_REPEATS * period, MIN_TOKENS)
            tail = output[max(end - length, 0) : end]
            if len(tail) == length and all(tail[at] == tail[at - period] for at in range(period, length)):
                return end
    return None


patterns = st.lists(st.integers(0, 3), min_size=1, max_size=70)


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Stretches of loops, near loops and other tokens, of few kinds so that shorter periods hide in longer ones."""
    output: list[int] = []
    for pattern in draw(st.lists(patterns, min_size=1, max_size=4)):
        repeats = draw(st.integers(1, 8))
        stretch = pattern * (repeats * max(1, 40 // len(pattern)))
        output += stretch[: draw(st.integers(1, len(stretch)))]
    return output


@given(outputs())
@example([1] * 96)
@example(list(range(64)) * 4)
@example([0, *range(1, 65), *range(1, 65), *range(1, 65), *range(1, 64)])
def test_a_loop_is_noticed_exactly_when_its_definition_says(output: list[int]) -> None:
    assert noticed(output) == noticed_plainly(output)


@pytest.mark.parametrize(
    ("period", "tokens"), [(1, 96), (2, 96), (5, 96), (24, 96), (25, 100), (48, 192), (63, 252), (64, 256)]
)
@pytest.mark.parametrize("before", [0, 1, 17, 31, 32, 33, 500])
def test_a_loop_of_any_period_is_noticed_at_its_last_token_wherever_it_begins(
    period: int, tokens: int, before: int
) -> None:
    prelude = list(range(1000, 1000 + before))
    loop = (list(range(period)) * 100)[: tokens + 10]
    assert noticed(prelude + loop) == before + tokens
    assert noticed(prelude + loop[: tokens - 1]) is None


def test_a_pattern_of_more_than_64_tokens_is_no_loop() -> None:
    assert noticed(list(range(65)) * 20) is None


def test_a_broken_loop_is_counted_from_the_start() -> None:
    nearly = [1, 2, 3] * 31 + [1, 2]
    assert noticed([*nearly, 9, *nearly]) is None
    assert noticed([*nearly, 9, *nearly, 3]) == 2 * len(nearly) + 2


def test_lists_that_repeat_a_little_are_no_loops() -> None:
    rows = [token for number in range(50) for token in (1, 2, 3, 1000 + number, 4)]
    assert noticed(rows) is None


# --- in the engine --------------------------------------------------------------------------------------------------


def looping_driver(*, num_pages: int = 256, max_batch_seqs: int = 64, steps_ahead: int = 0) -> Driver:
    """Its vocabulary holds one token, so that each output is a loop."""
    return Driver(vocab_size=1, num_pages=num_pages, max_batch_seqs=max_batch_seqs, steps_ahead=steps_ahead)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_output_without_a_limit_ends_with_its_loop_and_its_pages_are_freed(steps_ahead: int) -> None:
    driver = looping_driver(steps_ahead=steps_ahead)
    driver.run(make_request(1, [0] * 5, max_tokens=None, n=3), make_request(2, [0] * 9, max_tokens=None))
    for outcome in driver.outcomes.values():
        assert (len(outcome.token_ids), outcome.finish_reason) == (MIN_TOKENS, FinishReason.REPETITION)


def test_a_loop_ends_an_output_at_the_same_token_alone_batched_and_preempted() -> None:
    # Each in a tree of its own: they would share all their pages.
    requests = [make_request(id, [0] * (5 + 3 * id), max_tokens=None, cache_salt=str(id)) for id in range(4)]
    # Two of them fit at a time.
    crowded = looping_driver(num_pages=60)
    crowded.run(*requests)
    assert crowded.engine.scheduler.counters.preemptions > 0
    alone = looping_driver()
    for request in requests:
        alone.run(request)
    assert crowded.outcomes == alone.outcomes


@pytest.mark.parametrize(("max_tokens", "ignore_eos", "count"), [(200, False, 200), (None, True, 295)])
def test_loops_continue_under_an_explicit_limit_or_ignored_ends(
    max_tokens: int | None, ignore_eos: bool, count: int
) -> None:
    driver = Driver(vocab_size=1, max_seq_len=300, num_pages=256)
    driver.run(make_request(1, [0] * 5, max_tokens=max_tokens, ignore_eos=ignore_eos))
    outcome = driver.outcomes[1, 0]
    assert (len(outcome.token_ids), outcome.finish_reason) == (count, FinishReason.LENGTH)


def test_no_loop_ends_an_output_before_its_min_tokens() -> None:
    driver = looping_driver()
    driver.run(make_request(1, [0] * 5, max_tokens=None, min_tokens=150))
    assert len(driver.outcomes[1, 0].token_ids) == 150

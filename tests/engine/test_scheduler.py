from dataclasses import replace

import pytest
from engine_driver import Driver, Outcome, make_request

from ostro.backends.fake import FakeRunner
from ostro.engine.batch import Batch
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.runner import SampledToken, Step
from ostro.engine.scheduler import Limits, Progress
from ostro.engine.sequence import PENDING, FinishReason
from ostro.errors import BadRequest, ContextLengthExceeded

PREFIX = [i * i % 997 for i in range(1000)]


# ---- admission


def test_request_that_can_never_fit_is_refused_and_leaves_nothing_behind() -> None:
    driver = Driver(page_size=4, num_pages=4, max_seq_len=100)
    with pytest.raises(ContextLengthExceeded) as refusal:
        driver.add(make_request(1, range(10), max_tokens=7, n=3))
    assert (refusal.value.limit, refusal.value.prompt, refusal.value.output) == (16, 10, 7)
    assert not driver.engine.has_work
    driver.finish()
    assert driver.engine.scheduler.kv.usage.free == 4


def test_request_longer_than_the_context_is_refused_though_pages_would_do() -> None:
    driver = Driver(page_size=4, num_pages=100, max_seq_len=16)
    with pytest.raises(ContextLengthExceeded):
        driver.add(make_request(1, range(10), max_tokens=7))


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(10, 6), (16, 0), (1, 15), (10, None), (15, None)])
@pytest.mark.parametrize("n", [1, 3])
def test_request_that_fits_exactly_runs(num_prompt: int, max_tokens: int | None, n: int) -> None:
    driver = Driver(page_size=4, num_pages=4)
    request = make_request(1, range(num_prompt), max_tokens=max_tokens, n=n)
    driver.run(request)
    driver.check_outcomes(request)


def test_open_ended_request_is_refused_when_its_prompt_leaves_no_room_for_a_token() -> None:
    driver = Driver(page_size=4, num_pages=4)
    with pytest.raises(ContextLengthExceeded):
        driver.add(make_request(1, range(16), max_tokens=None))


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request(1, []), "prompt"),
        (make_request(1, [3, 1000]), "prompt"),
        (make_request(1, [3, -1]), "prompt"),
        (make_request(1, [3], stop_token_ids=[1000]), "stop_token_ids"),
    ],
    ids=["no prompt", "token beyond the vocabulary", "negative token", "stop token beyond the vocabulary"],
)
def test_request_that_the_model_cannot_take_is_refused_by_the_name_of_its_field(request_: Request, param: str) -> None:
    driver = Driver(vocab_size=1000)
    with pytest.raises(BadRequest) as refusal:
        driver.add(request_)
    assert refusal.value.param == param
    assert not driver.engine.has_work


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-1, 1)])
def test_limits_below_one_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match="must be at least 1"):
        Limits(max_batch_tokens=limits[0], max_batch_seqs=limits[1])


# ---- order and budget


def test_idle_engine_has_nothing_to_do() -> None:
    driver = Driver()
    assert driver.step() == []
    assert driver.engine.scheduler.counters.steps == 0


def test_long_prompt_is_cut_to_the_budget_and_others_decode_beside_it() -> None:
    driver = Driver(max_batch_tokens=16)
    driver.add(make_request(1, range(4), max_tokens=20))
    driver.step()
    driver.add(make_request(2, range(100, 150), max_tokens=2))
    driver.step()
    assert [(chunk.seq.request.id, chunk.length) for chunk in driver.runner.batches[-1].chunks] == [(1, 1), (2, 15)]
    driver.finish()


def test_long_prompt_is_cut_shorter_the_longer_its_context_is() -> None:
    """A step took ten times as long at the end of a prompt of 6,000 tokens as at its beginning."""
    driver = Driver(max_batch_tokens=64, num_pages=200, context_price=1 / 64)
    request = make_request(1, range(400), max_tokens=2)
    driver.run(request)
    lengths = [batch.num_tokens for batch in driver.runner.batches]
    assert lengths[:4] == [64, 32, 25, 22]
    assert sum(lengths) == 401
    driver.check_outcomes(request)


def test_budget_that_a_long_context_uses_up_is_not_given_to_a_newcomer() -> None:
    driver = Driver(max_batch_tokens=64, num_pages=200, context_price=1 / 64)
    driver.add(make_request(1, range(400), max_tokens=2))
    driver.step()
    driver.add(make_request(2, range(500, 510), max_tokens=2))
    driver.step()
    assert [(chunk.seq.request.id, chunk.length) for chunk in driver.runner.batches[-1].chunks] == [(1, 32)]
    driver.finish()


def test_single_tokens_go_before_a_long_prompt_that_ranks_ahead() -> None:
    driver = Driver(max_batch_tokens=16)
    driver.add(make_request(1, range(4), max_tokens=20, priority=1))
    driver.step()
    driver.add(make_request(2, range(100, 150), max_tokens=2))
    driver.step()
    driver.step()
    assert [(chunk.seq.request.id, chunk.length) for chunk in driver.runner.batches[-1].chunks] == [(1, 1), (2, 15)]
    driver.finish()


def test_lower_priority_number_runs_first() -> None:
    driver = Driver(max_batch_seqs=1)
    for id, priority in ((1, 1), (2, 0), (3, -1), (4, 0)):
        driver.add(make_request(id, [id], max_tokens=1, priority=priority))
    order = []
    while driver.engine.has_work:
        order += [gain.request_id for gain in driver.step()]
    assert order == [3, 2, 4, 1]


def test_no_more_sequences_run_than_there_are_seats() -> None:
    """The driver checks it after every step; here the choices of one request must queue for seats too."""
    driver = Driver(max_batch_seqs=2)
    requests = [make_request(id, [id] * 5, n=4, max_tokens=6) for id in range(3)]
    driver.run(*requests)
    driver.check_outcomes(*requests)


# ---- pages run out


def test_last_ranked_is_preempted_and_the_first_goes_on() -> None:
    driver = Driver(page_size=4, num_pages=6)
    requests = [make_request(id, [id] * 8, max_tokens=16) for id in (1, 2)]
    for request in requests:
        driver.add(request)
    ended = []
    while driver.engine.has_work:
        ended += [gain.request_id for gain in driver.step() if gain.finish_reason]
    assert ended == [1, 2]
    assert driver.engine.scheduler.counters.preemptions == 1
    driver.check_outcomes(*requests)


def test_newcomer_waits_rather_than_take_the_last_pages_of_those_that_run() -> None:
    driver = Driver(page_size=4, num_pages=5)
    driver.add(make_request(1, [1] * 4, max_tokens=6))
    driver.step()
    driver.add(make_request(2, [2] * 12, max_tokens=1))
    driver.step()
    assert [chunk.seq.request.id for chunk in driver.runner.batches[-1].chunks] == [1]
    driver.finish()
    assert driver.engine.scheduler.counters.preemptions == 0


def test_preempted_sequence_finds_the_pages_it_generated() -> None:
    """Its hit ended with its prompt, so that it computed again all that it had generated.

    Both have filled four pages when the first takes the ninth; the second comes back when the first is done.
    """
    driver = Driver(page_size=4, num_pages=9)
    requests = [make_request(1, [1] * 8, max_tokens=13), make_request(2, [2] * 8, max_tokens=24)]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    assert driver.engine.scheduler.counters.preemptions == 1
    assert driver.computed_tokens == (8 + 13 - 1) + (8 + 24 - 1)


def test_every_choice_can_be_preempted_and_comes_back() -> None:
    driver = Driver(page_size=2, num_pages=12)
    request = make_request(1, range(9), n=4, max_tokens=12)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.engine.scheduler.counters.preemptions > 0


def test_choice_that_finds_no_page_to_fork_waits_its_turn() -> None:
    driver = Driver(page_size=4, num_pages=3)
    request = make_request(1, range(10), n=2, max_tokens=2)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.forks_without_page == 1


def test_fork_that_is_preempted_before_its_copy_ran_gets_its_tokens_all_the_same() -> None:
    """The leader takes the page of the copy in the very next step, when the copy is still to run."""
    driver = Driver(page_size=4, num_pages=3, max_batch_tokens=64)
    request = make_request(1, range(7), n=2, max_tokens=5)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.engine.scheduler.counters.preemptions > 0


# ---- choices of one request


def test_prompt_is_computed_once_for_all_choices() -> None:
    driver = Driver(page_size=4)
    request = make_request(1, range(10), n=4, max_tokens=6)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.computed_tokens == 10 + 4 * (6 - 1)
    assert sum(len(batch.page_copies) for batch in driver.runner.batches) == 3


def test_choices_differ_unless_they_are_greedy() -> None:
    driver = Driver()
    driver.run(
        make_request(1, range(5), n=3, max_tokens=8), make_request(2, range(5), n=3, max_tokens=8, temperature=0)
    )
    tokens = {key: tuple(outcome.token_ids) for key, outcome in driver.outcomes.items()}
    assert len({tokens[1, choice] for choice in range(3)}) == 3
    assert len({tokens[2, choice] for choice in range(3)}) == 1


@pytest.mark.parametrize(("num_pages", "max_batch_seqs"), [(64, 64), (64, 1), (6, 64)])
def test_prompt_log_probabilities_are_delivered_once_whatever_becomes_of_the_choices(
    num_pages: int, max_batch_seqs: int
) -> None:
    """A choice that had to wait or was preempted computed and delivered them again, for itself."""
    driver = Driver(page_size=4, num_pages=num_pages, max_batch_seqs=max_batch_seqs)
    request = make_request(1, range(9), n=4, max_tokens=8, prompt_logprobs_from=0)
    driver.run(request)
    driver.check_outcomes(request)
    delivered = [len(driver.outcomes[1, choice].prompt_logprobs) for choice in range(4)]
    assert delivered == [8, 0, 0, 0]


def test_all_progress_of_all_choices_reports_the_same_cached_tokens() -> None:
    """Forked choices reported none from their second token on."""
    driver = Driver(page_size=4)
    driver.run(make_request(1, range(8)))
    driver.add(make_request(2, range(12), n=3, max_tokens=3))
    told = set()
    while driver.engine.has_work:
        told |= {gain.num_cached for gain in driver.step()}
    assert told == {8}


# ---- abort


@pytest.mark.parametrize("steps", range(6))
def test_aborted_request_gives_everything_back(steps: int) -> None:
    driver = Driver(page_size=4, num_pages=16, max_batch_tokens=6)
    other = make_request(2, range(100, 109), max_tokens=5)
    driver.add(make_request(1, range(15), n=3, max_tokens=9))
    driver.add(other)
    for _ in range(steps):
        driver.step()
    driver.abort(1)
    assert not any(seq.request.id == 1 for seq in driver.engine.scheduler.running + driver.engine.scheduler.waiting)
    driver.finish()
    driver.check_outcomes(other)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("aborted", range(3))
def test_other_choices_go_on_without_the_aborted_one(steps: int, aborted: int) -> None:
    driver = Driver(page_size=4, num_pages=32, max_batch_tokens=6)
    request = make_request(1, range(15), n=3, max_tokens=9)
    driver.add(request)
    for _ in range(steps):
        driver.step()
    driver.abort(1, aborted)
    driver.finish()
    for choice in {0, 1, 2} - {aborted}:
        assert driver.outcomes[1, choice].token_ids == driver.expected(request, choice).token_ids


def test_result_for_a_sequence_that_was_aborted_while_the_step_ran_is_dropped() -> None:
    driver = Driver()
    request = make_request(1, range(5), n=2)
    driver.add(request)
    driver.runner.while_running = lambda: driver.abort(1, 0)
    assert [gain.choice for gain in driver.step()] == [1]
    driver.finish()
    assert driver.outcomes[1, 0] == Outcome()
    assert driver.outcomes[1, 1].token_ids == driver.expected(request, 1).token_ids


def test_abort_of_an_unknown_or_ended_request_is_ignored() -> None:
    driver = Driver()
    request = make_request(1, range(5))
    driver.run(request)
    driver.abort(1)
    driver.abort(77)
    driver.finish()
    driver.check_outcomes(request)


# ---- ends


def stop_token(driver: Driver, request: Request, at: int) -> int:
    """A token that the request first generates at this place."""
    tokens = driver.expected(request).token_ids
    assert tokens[at] not in tokens[:at]
    return tokens[at]


def test_stop_token_ends_the_sequence_and_is_delivered() -> None:
    driver = Driver()
    stop = stop_token(driver, make_request(1, range(5), max_tokens=20), 6)
    driver.run(make_request(1, range(5), max_tokens=20, stop_token_ids=[stop]))
    outcome = driver.outcomes[1, 0]
    assert (len(outcome.token_ids), outcome.token_ids[-1]) == (7, stop)
    assert outcome.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 7), (True, 20)])
def test_end_of_sequence_token_counts_unless_it_is_ignored(ignore_eos: bool, length: int) -> None:
    driver = Driver()
    eos = stop_token(driver, make_request(1, range(5), max_tokens=20), 6)
    driver.run(make_request(1, range(5), max_tokens=20, eos_ids=[eos], ignore_eos=ignore_eos))
    assert len(driver.outcomes[1, 0].token_ids) == length


def test_stop_token_does_not_end_the_sequence_before_min_tokens() -> None:
    driver = Driver()
    stop = stop_token(driver, make_request(1, range(5), max_tokens=20), 6)
    request = make_request(1, range(5), max_tokens=20, stop_token_ids=[stop], min_tokens=7)
    driver.run(request)
    assert len(driver.outcomes[1, 0].token_ids) > 7
    driver.check_outcomes(request)


def test_no_tokens_are_generated_when_none_are_asked_for() -> None:
    driver = Driver(max_batch_tokens=4)
    request = make_request(1, range(10), max_tokens=0, n=2, prompt_logprobs_from=3)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.outcomes[1, 0].finish_reason is FinishReason.LENGTH
    assert len(driver.outcomes[1, 0].prompt_logprobs) == 7
    assert driver.computed_tokens == 10


def test_scored_positions_are_computed_and_those_before_may_come_from_the_cache() -> None:
    driver = Driver(page_size=4)
    driver.run(make_request(1, range(16), max_tokens=1))
    before = driver.computed_tokens
    request = make_request(2, range(16), max_tokens=0, prompt_logprobs_from=9)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.computed_tokens - before == 8


def test_embedding_computes_its_whole_prompt_and_adds_up_its_chunks() -> None:
    driver = Driver(page_size=4, max_batch_tokens=3)
    driver.run(make_request(1, range(10)))
    before = driver.computed_tokens
    request = make_request(2, range(10), max_tokens=0, task=Task.EMBED)
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.computed_tokens - before == 10


class BrokenSampler:
    """A runner that cannot draw a token for one sequence."""

    strides = 0
    failure = None

    def __init__(self, *, request_id: int, choice: int) -> None:
        self.fake = FakeRunner()
        self.spec = self.fake.spec
        self.broken = (request_id, choice)

    def launch(self, batch: Batch) -> Step:
        output = self.fake.run(batch)
        for seq in batch.sampled:
            if (seq.request.id, seq.choice) == self.broken:
                output.sampled[seq.id] = SampledToken(0, error="all tokens are banned")
        return Step(lambda: output)


@pytest.mark.parametrize("choice", [0, 1])
def test_sequence_whose_token_cannot_be_drawn_fails_alone(choice: int) -> None:
    engine = EngineCore(BrokenSampler(request_id=1, choice=choice))
    for id in (1, 2):
        engine.add(make_request(id, range(5), n=2, max_tokens=3))
    gains: list[Progress] = []
    while engine.has_work:
        gains += engine.step()
        engine.check_integrity()
    ends = {(gain.request_id, gain.choice): gain.finish_reason for gain in gains if gain.finish_reason}
    assert ends.pop((1, choice)) is FinishReason.ERROR
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert len(ends) == 3
    assert [gain.error for gain in gains if gain.error] == ["all tokens are banned"]
    assert engine.scheduler.kv.usage.in_use == 0


# ---- common prefixes are computed once

TAIL, OUTPUT = 5, 3
# What each request computes beyond the prefix; the last token that it generates is computed by nobody.
OWN = TAIL + OUTPUT - 1


def alike(count: int = 32, *, salt: str = "", first_id: int = 0) -> list[Request]:
    """Requests that share a prefix of 1,000 tokens and go on differently."""
    ids = range(first_id, first_id + count)
    return [make_request(id, [*PREFIX, *[id] * TAIL], max_tokens=OUTPUT, cache_salt=salt) for id in ids]


def wide_driver(
    *, page_size: int = 8, max_batch_tokens: int = 512, max_batch_seqs: int = 64, prefix_caching: bool = True
) -> Driver:
    return Driver(
        page_size=page_size,
        num_pages=80_000 // page_size,
        max_batch_tokens=max_batch_tokens,
        max_batch_seqs=max_batch_seqs,
        prefix_caching=prefix_caching,
    )


def test_common_prefix_is_computed_once_when_the_first_request_is_done() -> None:
    driver, requests = wide_driver(), alike()
    driver.run(requests[0])
    driver.run(*requests[1:])
    driver.check_outcomes(*requests)
    assert driver.computed_tokens == 1000 + 32 * OWN
    assert driver.engine.scheduler.counters.cache_hits == 31 * 1000


@pytest.mark.cases(7)
@pytest.mark.parametrize("max_batch_tokens", [7, 64, 512, 1000, 1001, 100_000])
@pytest.mark.parametrize("max_batch_seqs", [3, 64])
def test_common_prefix_is_computed_once_when_all_arrive_together(max_batch_tokens: int, max_batch_seqs: int) -> None:
    """As many as fitted into the step's budget were admitted, and each computed the prefix for itself."""
    driver = wide_driver(max_batch_tokens=max_batch_tokens, max_batch_seqs=max_batch_seqs)
    requests = alike()
    driver.run(*requests)
    driver.check_outcomes(*requests)
    assert driver.computed_tokens == 1000 + 32 * OWN
    assert driver.engine.scheduler.counters.cache_hits == 31 * 1000


def test_rest_of_a_prefix_that_fills_no_page_is_computed_by_each() -> None:
    driver, requests = wide_driver(page_size=16), alike()
    driver.run(*requests)
    assert driver.computed_tokens == 1000 + 31 * (1000 % 16) + 32 * OWN


def test_equal_prompts_are_computed_once_but_for_the_last_page() -> None:
    """One position must be computed for its logits, and pages are shared whole."""
    driver = wide_driver(page_size=8)
    driver.run(*(make_request(id, PREFIX, max_tokens=1) for id in range(32)))
    assert driver.computed_tokens == 1000 + 31 * 8


def test_those_that_wait_for_the_prefix_all_start_in_the_step_after_it() -> None:
    driver = wide_driver(max_batch_tokens=2000)
    for request in alike():
        driver.add(request)
    driver.step()
    assert len(driver.runner.batches[-1].chunks) == 1
    driver.step()
    assert len(driver.runner.batches[-1].chunks) == 32


def test_prefix_grows_with_each_branch_that_is_computed() -> None:
    """A tree of prompts that arrives at once: every page of it is computed once."""
    stems = [[*PREFIX[:40], *[branch] * 40] for branch in range(3)]
    driver = wide_driver(max_batch_tokens=4096)
    requests = [
        make_request(10 * at + leaf, [*stem, *[100 + leaf] * 7], max_tokens=1)
        for at, stem in enumerate(stems)
        for leaf in range(4)
    ]
    driver.run(*requests)
    driver.check_outcomes(*requests)
    assert driver.computed_tokens == 40 + 3 * 40 + 12 * 7
    assert driver.engine.scheduler.counters.steps == 3


def test_prefix_is_computed_once_for_each_salt() -> None:
    driver = wide_driver(max_batch_tokens=4096)
    driver.run(*alike(4, salt="mine"), *alike(4, salt="yours", first_id=4))
    assert driver.computed_tokens == 2 * 1000 + 8 * OWN


def first_step_chunks(driver: Driver, *requests: Request) -> list[tuple[int, int]]:
    for request in requests:
        driver.add(request)
    driver.step()
    chunks = [(chunk.seq.request.id, chunk.length) for chunk in driver.runner.batches[-1].chunks]
    driver.finish()
    driver.check_outcomes(*requests)
    return chunks


def test_nobody_waits_for_a_prefix_when_prefixes_are_not_cached() -> None:
    driver = wide_driver(max_batch_tokens=10_000, prefix_caching=False)
    assert first_step_chunks(driver, *alike(4)) == [(id, 1000 + TAIL) for id in range(4)]


def test_nobody_waits_for_less_than_a_page() -> None:
    driver = wide_driver(page_size=8)
    requests = [make_request(id, [*range(7), 100 + id, 5]) for id in range(4)]
    assert first_step_chunks(driver, *requests) == [(id, 9) for id in range(4)]


def test_nobody_waits_for_pages_that_must_be_computed_for_their_logits() -> None:
    driver = wide_driver(max_batch_tokens=10_000)
    requests = [make_request(id, PREFIX, max_tokens=0, prompt_logprobs_from=0) for id in range(3)]
    assert first_step_chunks(driver, *requests) == [(id, 1000) for id in range(3)]


def test_scores_after_a_common_context_compute_the_context_once() -> None:
    driver = wide_driver(max_batch_tokens=10_000)
    requests = [make_request(id, [*PREFIX, *[id] * TAIL], max_tokens=0, prompt_logprobs_from=1000) for id in range(4)]
    assert first_step_chunks(driver, *requests) == [(0, 1000 + TAIL)]
    # Position 999 gives the first continuation token's log-probability, so its page is computed by each.
    assert driver.computed_tokens == 1000 + TAIL + 3 * (8 + TAIL)


def test_embedding_waits_for_nobody() -> None:
    driver = wide_driver(max_batch_tokens=10_000)
    requests = [make_request(id, PREFIX, max_tokens=0, task=Task.EMBED) for id in range(3)]
    assert first_step_chunks(driver, *requests) == [(id, 1000) for id in range(3)]


def test_other_requests_pass_those_that_wait_for_a_prefix() -> None:
    driver = wide_driver(max_batch_tokens=10_000)
    other = make_request(9, range(600, 650))
    assert first_step_chunks(driver, *alike(3), other) == [(0, 1000 + TAIL), (9, 50)]


def test_other_requests_do_not_take_the_seat_of_one_that_waits_for_a_prefix() -> None:
    driver = wide_driver(max_batch_tokens=10_000, max_batch_seqs=2)
    other = make_request(9, range(600, 650))
    assert first_step_chunks(driver, *alike(2), other) == [(0, 1000 + TAIL)]


@pytest.mark.parametrize("while_running", [False, True])
def test_next_in_line_computes_the_prefix_when_its_computer_is_aborted(while_running: bool) -> None:
    driver, requests = wide_driver(max_batch_tokens=500), alike()
    for request in requests:
        driver.add(request)
    driver.step()
    if while_running:
        driver.runner.while_running = lambda: driver.abort(0)
        driver.step()
    else:
        driver.abort(0)
    driver.finish()
    driver.check_outcomes(*requests[1:])
    # All pages whose computation was begun are shared; 496 of the first 500 tokens fill pages, as do all 1000.
    lost = 0 if while_running else 4
    assert driver.computed_tokens == 1000 + lost + 31 * OWN


# ---- progress


@pytest.mark.parametrize("max_batch_tokens", [1, 5, 64])
def test_crowd_in_a_pool_for_one_gets_through(max_batch_tokens: int) -> None:
    """The driver bounds the number of steps."""
    driver = Driver(page_size=2, num_pages=10, max_batch_tokens=max_batch_tokens)
    requests = [
        make_request(id, [id % 3] * (1 + id % 7), max_tokens=13, n=1 + id % 3, priority=id % 2) for id in range(20)
    ]
    driver.run(*requests)
    driver.check_outcomes(*requests)


def test_first_ranked_is_not_preempted_by_later_ones_however_many_come() -> None:
    driver = Driver(page_size=2, num_pages=14, max_batch_tokens=8)
    first = make_request(0, [1] * 8, max_tokens=20)
    driver.add(first)
    steps = 0
    while driver.outcomes[0, 0].finish_reason is None:
        steps += 1
        driver.add(make_request(steps, [steps % 7] * 5, max_tokens=6))
        driver.step()
    assert steps == 20
    driver.finish()
    driver.check_outcomes(first)


# ---- one step ahead


def test_step_ahead_begins_before_the_tokens_of_the_last_are_known() -> None:
    driver = Driver(steps_ahead=1)
    request = make_request(1, range(5), max_tokens=4)
    driver.add(request)
    assert driver.step() == []
    assert len(driver.runner.batches) == 1
    assert [gain.token_ids for gain in driver.step()] == [driver.expected(request).token_ids[:1]]
    assert len(driver.runner.batches) == 2
    driver.finish()
    driver.check_outcomes(request)
    # The last token is sampled in the fourth step, and no fifth one is begun to throw away.
    assert driver.computed_tokens == 5 + 3


def test_token_sampled_after_a_stop_is_thrown_away() -> None:
    driver = Driver(steps_ahead=1)
    [first, second, *_] = driver.expected(make_request(1, range(5), max_tokens=9)).token_ids
    assert first != second
    request = make_request(1, range(5), max_tokens=9, stop_token_ids=[second])
    driver.run(request)
    driver.check_outcomes(request)
    assert driver.computed_tokens == 5 + 2


def test_sequence_whose_bans_depend_on_its_tokens_waits_until_they_are_known() -> None:
    driver = Driver(steps_ahead=1)
    patient = replace(make_request(1, range(5), max_tokens=6), bad_word_ids=((1, 2),))
    eager = make_request(2, range(7), max_tokens=6)
    for request in (patient, eager):
        driver.add(request)
    while driver.engine.has_work:
        before = len(driver.runner.batches)
        known = {seq.request.id: PENDING not in seq.token_ids for seq in driver.engine.scheduler.running}
        driver.step()
        for batch in driver.runner.batches[before:]:
            assert all(known.get(1, True) for chunk in batch.chunks if chunk.seq.request.id == 1)
    driver.check_outcomes(patient, eager)


# ---- what it tells of a step


def test_each_step_reports_the_requests_it_starts_and_preempts() -> None:
    engine = EngineCore(FakeRunner(page_size=4, num_pages=6, max_seq_len=100, vocab_size=1000, max_batch_tokens=64))
    begun, preempted = [], []
    for number in (1, 2, 3):
        engine.add(make_request(number, range(number, number + 5), max_tokens=14, n=2 if number == 1 else 1))
    while engine.has_work:
        engine.step()
        begun += engine.scheduler.begun
        preempted += engine.scheduler.preempted
    assert begun == [1, 2, 3]
    assert len(preempted) == engine.scheduler.counters.preemptions > 0


def test_what_a_step_begins_is_reported_before_it_computes() -> None:
    """A request that died or left in its first step seemed to have been queued until then."""

    class Dying(FakeRunner):
        def launch(self, batch: Batch) -> Step:
            raise RuntimeError("out of memory")

    engine = EngineCore(Dying(page_size=4, num_pages=6, max_seq_len=100, vocab_size=1000, max_batch_tokens=64))
    engine.add(make_request(7, range(5)))
    told = []
    with pytest.raises(RuntimeError):
        engine.step(lambda: told.extend(engine.scheduler.begun))
    assert told == [7]

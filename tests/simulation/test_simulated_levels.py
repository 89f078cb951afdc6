"""Levels of a load on a fleet, and their report."""

import msgspec
import pytest
from simulated import at_rate, by_clients, cost_table, load, simulated

from ostro.errors import BadRequest
from ostro.measure.bench.jobs import Level
from ostro.measure.bench.page import page
from ostro.measure.bench.table import table
from ostro.measure.bench.workload import Item, Messages, Span
from ostro.simulation.costs import EndpointCosts
from ostro.simulation.prompts import Prompt, PromptTokens
from ostro.simulation.run import SimulationOptions, simulate


def test_a_closed_loop_has_as_many_requests_at_a_time_as_clients() -> None:
    outcomes = simulated(by_clients(3, 30)).bench.levels[0].outcomes
    assert [each.index for each in outcomes] == list(range(30))
    for one in outcomes:
        middle = one.start + one.e2e / 2
        assert sum(each.start <= middle <= each.start + each.e2e for each in outcomes) <= 3


def test_a_trace_is_replayed_at_its_times_and_speed() -> None:
    items = [Item(input_len=5, output_len=2, at=at) for at in (0.0, 1.0, 4.0)]
    level = Level(kind="trace", value=2.0, number=0, requests=3)
    outcomes = simulated(level, workload=load(items=items)).bench.levels[0].outcomes
    assert [each.start for each in outcomes] == [0.0, 0.5, 2.0]


def test_a_duration_ends_both_kinds_of_load() -> None:
    for kind, value in (("rate", 100.0), ("concurrency", 2.0)):
        level = Level(kind=kind, value=value, number=0, requests=None, duration=0.5)  # type: ignore[arg-type]
        outcomes = simulated(level).bench.levels[0].outcomes
        assert outcomes
        assert all(each.start < 0.5 for each in outcomes)


def test_what_a_template_puts_before_a_prompt_is_cached_by_the_first_request() -> None:
    """Which a benchmark sends before its load, warm-up or not."""
    workload = load(inputs=Span(16, 16), endpoint="chat")
    [found] = simulated(by_clients(1, 1, warmup=0), workload=workload).bench.levels[0].outcomes
    assert (found.cached_tokens, found.input_tokens) == (4, 16)


def _said(*texts: str) -> Messages:
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


@pytest.mark.parametrize("kept", [True, False])
def test_a_turn_finds_the_answers_before_it_if_they_are_what_was_generated(kept: bool) -> None:
    """Turns have 16 words, in pages of 4 tokens; the template has 4 tokens before all messages and 2 after each."""
    first, answer, second = (" ".join(f"{name}{word}" for word in range(16)) for name in ("q", "a", "r"))
    later = _said(first if kept else "another", answer, second)
    items = [Item(prompt=_said(first), output_len=18), Item(prompt=later, output_len=1, at=9.0)]
    level = Level(kind="trace", value=1, number=0, requests=2)
    found = simulated(level, workload=load(items=items, endpoint="chat")).bench.levels[0].outcomes[-1]
    # The question with its template is 22 tokens, and 18 more are generated, of which the last is not computed.
    assert found.cached_tokens == (36 if kept else 4)


def test_the_turns_of_a_conversation_add_up_and_find_each_other() -> None:
    lengths = [(30, 16), (10, 8), (12, 4)]
    items = [
        Item(input_len=asked, output_len=told, at=9.0 * at, earlier=list(range(at)))
        for at, (asked, told) in enumerate(lengths)
    ]
    workload, level = load(items=items, endpoint="chat"), Level(kind="trace", value=1, number=0, requests=3)
    assert [len(workload.prompt(at)[0]) for at in range(3)] == [1, 3, 5]
    found = simulated(level, workload=workload).bench.levels[0].outcomes
    # With four tokens before all, and two after each message.
    assert [each.input_tokens for each in found] == [36, 36 + 18 + 12, 66 + 10 + 14]
    # All pages but those with tokens that nobody computed: an answer's last, and what the template has after it.
    assert [each.cached_tokens for each in found[1:]] == [48, 72]


def test_without_prefix_caching_nothing_is_cached() -> None:
    workload = load(shared_prefix=32, inputs=Span(4, 4))
    with_it, without = (
        simulated(at_rate(50, 20), workload=workload, prefix_caching=caching).bench.levels[0].figures.cached_share
        for caching in (True, False)
    )
    assert with_it is not None
    assert with_it > 0.5
    assert without == 0


def test_levels_share_their_replicas_caches() -> None:
    levels = [msgspec.structs.replace(at_rate(50, 10), number=number) for number in range(2)]
    workload = load(items=[Item(prompt=f"a b c d e f g {end}", output_len=1) for end in ("h i", "j k")])
    options = SimulationOptions(table=cost_table(), workload=workload, levels=levels)
    first, second = (run.figures.cached_share for run in simulate(options).bench.levels)
    assert first is not None
    assert second is not None
    # Pages hold four tokens, and the last token of a prompt is always computed.
    assert first < second == 8 / 9


def test_fleet_figures_add_up() -> None:
    found = simulated(at_rate(200, 60), cost_table(num_pages=24), load(), replicas=2)
    [fleet] = found.fleets
    assert (fleet.replicas, fleet.replicas_used) == (2, 2)
    assert 0 < fleet.kv_mean < fleet.kv_most <= 1
    assert 0 < fleet.busy_share <= 1
    assert fleet.steps > 0


def test_the_report_is_that_of_a_benchmark() -> None:
    found = simulated(at_rate(100, 20), replicas=2)
    told = found.as_json()
    assert told["format"] == "ostro bench 1"
    assert told["simulated"] is True
    levels = told["levels"]
    assert isinstance(levels, list)
    assert levels[0]["fleet"]["replicas"] == 2
    assert "TTFT p99" in table(found.bench)
    assert "Benchmark of tiny" in page(found.bench)


def test_an_endpoint_without_costs_is_refused() -> None:
    bare = msgspec.structs.replace(cost_table(), endpoints={})
    with pytest.raises(BadRequest, match="--endpoint completions"):
        simulated(at_rate(1, 1), bare)


def _tokens(per_word: float = 1.0) -> PromptTokens:
    costs = EndpointCosts(request=0, prompt_token=0, tokens_per_word=per_word, tokens_before=3, tokens_after=2)
    return PromptTokens(costs, 50_000)


def test_texts_that_begin_alike_have_tokens_that_do() -> None:
    for per_word in (1.0, 1.37, 0.6):
        one, other = (
            _tokens(per_word).of(f"the old man and the {end}").token_ids for end in ("sea", "mountain of gold")
        )
        shared = 3 + int(5 * per_word) - 1
        assert one[:shared] == other[:shared]
        assert one != other


def test_a_conversation_begins_like_the_one_before_it() -> None:
    before: Messages = [{"role": "user", "content": "hello there"}]
    after: Messages = [*before, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, {"role": "user"}]
    (one, history, _), (other, other_history, _) = _tokens().of(before), _tokens().of(after)
    assert history == len(one) == other_history
    assert other[: len(one)] == one
    assert len(other) == len(one) + 1 + 2 + 2


def test_token_ids_stay_as_they_are() -> None:
    assert _tokens().of([5, 6, 7]) == Prompt((5, 6, 7), 3)

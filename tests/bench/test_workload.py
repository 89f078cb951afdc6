import itertools
import json
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.measure.bench.workload import Item, Span, WordTokens, Workload

RANDOM = Workload(model="m", input_len=Span(10, 50), output_len=Span(5, 20), seed=3)


def body(workload: Workload, index: int, level: int = 0) -> Any:
    return json.loads(workload.request(index, level)[0])


def text(workload: Workload, index: int, level: int = 0) -> str:
    return str(body(workload, index, level)["messages"][0]["content"])


def test_same_seed_asks_the_same() -> None:
    again = Workload(model="m", input_len=Span(10, 50), output_len=Span(5, 20), seed=3)
    assert [RANDOM.request(index) for index in range(20)] == [again.request(index) for index in range(20)]
    other = Workload(model="m", input_len=Span(10, 50), output_len=Span(5, 20), seed=4)
    assert RANDOM.request(0) != other.request(0)


def test_levels_have_the_same_lengths_and_other_words() -> None:
    for index in range(20):
        one, two = text(RANDOM, index, 0).split(), text(RANDOM, index, 1).split()
        assert len(one) == len(two)
        assert one != two
        assert RANDOM.request(index, 0)[1] == RANDOM.request(index, 1)[1]


@given(st.integers(0, 10**6))
def test_lengths_are_within_their_range(index: int) -> None:
    assert 10 <= len(text(RANDOM, index).split()) <= 50
    asked, max_tokens = RANDOM.request(index)
    assert 5 <= max_tokens <= 20
    assert json.loads(asked)["max_tokens"] == max_tokens


def test_words_are_as_many_as_make_the_tokens() -> None:
    words = WordTokens(per_word=1.25, around=30)
    workload = Workload(model="m", input_len=Span(130, 130), output_len=Span(1, 1), words=words)
    assert len(text(workload, 0).split()) == 80


def test_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    workload = Workload(model="m", input_len=Span(10, 10), output_len=Span(1, 1), shared_prefix=25)
    one, two = text(workload, 0).split(), text(workload, 1).split()
    assert len(one) == len(two) == 35
    assert one[:25] == two[:25]
    assert one[25:] != two[25:]


def test_prompts_of_token_ids_have_exactly_their_length() -> None:
    workload = Workload(
        endpoint="completions", input_len=Span(7, 7), output_len=Span(1, 1), vocab_size=100, shared_prefix=3
    )
    prompt = body(workload, 0)["prompt"]
    assert len(prompt) == 10
    assert all(0 <= token < 100 for token in prompt)
    assert body(workload, 1)["prompt"][:3] == prompt[:3]


def test_given_prompts_are_asked_in_turn_with_their_own_lengths() -> None:
    items = [Item(prompt="a", output_len=3), Item(prompt=[{"role": "system", "content": "b"}])]
    workload = Workload(items=items, output_len=Span(9, 9))
    found = [body(workload, index) for index in range(4)]
    assert [each["max_tokens"] for each in found] == [3, 9, 3, 9]
    assert found[0]["messages"] == found[2]["messages"] == [{"role": "user", "content": "a"}]
    assert found[1]["messages"] == [{"role": "system", "content": "b"}]


def test_fields_of_the_body() -> None:
    workload = Workload(model="m", output_len=Span(9, 9), ignore_eos=True, body={"temperature": 0, "max_tokens": 2})
    found = body(workload, 0)
    assert found["stream"] is found["ignore_eos"] is True
    assert found["stream_options"] == {"include_usage": True}
    assert (found["temperature"], found["max_tokens"]) == (0, 2)
    bare = body(Workload(output_len=Span(9, 9), include_usage=False), 0)
    assert not {"stream_options", "ignore_eos"} & bare.keys()


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (100.0, 0.1)])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float, spread: float) -> None:
    times = list(itertools.islice(RANDOM.due(20.0, burstiness, 0), 20000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    # Of Poisson's process the deviation is the mean.
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.05)
    assert times == list(itertools.islice(RANDOM.due(20.0, burstiness, 0), 20000))


def test_trace_is_replayed_at_its_times_and_speed() -> None:
    items = [Item(input_len=5, at=at) for at in (0.0, 1.0, 4.0)]
    workload = Workload(items=items, output_len=Span(1, 1), speed=2.0)
    assert list(workload.replayed()) == [0.0, 0.5, 2.0]
    assert len(text(workload, 1).split()) == 5


def test_fields_set_for_every_request_win() -> None:
    """A length among them was not known to be the one that was asked for."""
    longer = Workload(model="m", output_len=Span(5, 5), body={"max_tokens": 9, "temperature": 0})
    data, most = longer.request(0)
    assert (json.loads(data)["max_tokens"], json.loads(data)["temperature"], most) == (9, 0, 9)
    assert Workload(output_len=Span(5, 5), body={"max_tokens": None}).request(0)[1] == 0

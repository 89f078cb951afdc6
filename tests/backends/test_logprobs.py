import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.backends.sampling.sampler import position_logprobs

tied_logits = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=40)


@given(logits=tied_logits, data=st.data())
@settings(max_examples=150, deadline=None)
def test_logprob_rank_and_top_match_a_plain_softmax(logits: list[float], data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(logits) - 1))
    top = data.draw(st.integers(0, 20))
    log_total = math.log(math.fsum(math.exp(logit) for logit in logits))
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))

    [found] = position_logprobs(torch.tensor([logits]), [target], top)

    assert found.token_id == target
    assert found.logprob == pytest.approx(logits[target] - log_total, abs=1e-6)
    assert found.rank == 1 + sum(logit > logits[target] for logit in logits)
    assert [token for token, _ in found.top] == ranking[:top]
    assert [value for _, value in found.top] == pytest.approx([logits[t] - log_total for t in ranking[:top]], abs=1e-6)


@given(logits=tied_logits, data=st.data())
@settings(max_examples=150, deadline=None)
def test_logprob_equals_the_highest_listed_exactly_when_no_token_is_more_likely(
    logits: list[float], data: st.DataObject
) -> None:
    target = data.draw(st.integers(0, len(logits) - 1))
    [found] = position_logprobs(torch.tensor([logits]), [target], 1)
    assert (found.logprob == found.top[0][1]) is (found.rank == 1) is (logits[target] == max(logits))


def test_logits_one_ulp_apart_do_not_share_a_logprob() -> None:
    logits = torch.full((1, 1000), 10.0)
    logits[0, 7] = torch.nextafter(torch.tensor(10.0), torch.tensor(11.0))
    [found] = position_logprobs(logits, [3], 1)
    assert found.rank == 2
    assert found.top[0][0] == 7
    assert found.logprob < found.top[0][1]


def test_shorter_list_is_the_beginning_of_a_longer_one_where_many_tie() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).mul(2).round()
    longest = position_logprobs(logits, [0, 1, 2, 3], 20)
    for top in (1, 2, 5, 19):
        shorter = position_logprobs(logits, [0, 1, 2, 3], top)
        assert [row.top for row in shorter] == [row.top[:top] for row in longest]


def test_rows_alone_and_in_a_batch_have_the_same_bits() -> None:
    """A sum over the vocabulary is split between threads when there is one row, and rounds differently."""
    for vocab in (1000, 49152, 50257):
        logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
        together = position_logprobs(logits, list(range(20)), 5)
        alone = [position_logprobs(logits[row : row + 1], [row], 5)[0] for row in range(20)]
        assert together == alone


def test_large_logits_do_not_overflow() -> None:
    [found] = position_logprobs(torch.tensor([[3e38, 1e38, -3e38]]), [0], 2)
    assert found.logprob == 0.0
    assert found.rank == 1


def test_impossible_token_has_minus_infinity_and_the_last_rank() -> None:
    [found] = position_logprobs(torch.tensor([[0.0, -math.inf, 1.0]]), [1], 0)
    assert found.logprob == -math.inf
    assert found.rank == 3
    assert found.top == ()


def test_no_positions_give_an_empty_list() -> None:
    assert position_logprobs(torch.empty(0, 10), [], 3) == []

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.backends.sampling.distribution import by_id, draw, ranked, total
from ostro.backends.sampling.random_stream import stream_key

# A weight of 2**-149 and one of 1 in the same row: what is small may vanish in the sum but must not break it.
weight = st.one_of(st.just(0.0), st.floats(0, 1, width=32), st.just(2.0**-149))
key = st.integers(-(2**63), 2**63 - 1)


def keys_of(count: int) -> torch.Tensor:
    return torch.tensor([stream_key(seed, 0, 0) for seed in range(count)])


@given(weights=st.lists(weight, min_size=1, max_size=300).filter(any), zeros=st.integers(0, 200), key=key)
@settings(max_examples=300, deadline=None)
def test_drawn_index_has_weight(weights: list[float], zeros: int, key: int) -> None:
    weights = weights + [0.0] * zeros
    [index] = draw(torch.tensor([weights]), torch.tensor([key])).tolist()
    assert weights[index] > 0


def test_draws_follow_the_weights_within_blocks_and_across_them() -> None:
    """Three blocks of unequal sums, the last one short; the same slots are heavy in one block and light in another."""
    weights = torch.tensor([0.01] * 128 + [0.02] * 128 + [0.04] * 44)
    weights[torch.tensor([3, 131, 127, 128, 259, 299])] = torch.tensor([1.0, 0.5, 0.25, 0.75, 0.25, 1.0])
    count = 20_000
    drawn = draw(weights.expand(count, -1), keys_of(count))
    expected = weights.double() / weights.double().sum() * count
    chi_square = ((torch.bincount(drawn, minlength=300) - expected) ** 2 / expected).sum().item()
    # 299 degrees of freedom: six standard deviations of the statistic.
    assert chi_square < 299 + 6 * math.sqrt(2 * 299)


@given(weights=st.lists(weight, min_size=1, max_size=300).filter(any), zeros=st.integers(1, 300), key=key)
@settings(max_examples=100, deadline=None)
def test_draw_does_not_depend_on_how_wide_the_row_is(weights: list[float], zeros: int, key: int) -> None:
    narrow, wide = torch.tensor([weights]), torch.tensor([weights + [0.0] * zeros])
    assert draw(narrow, torch.tensor([key])).tolist() == draw(wide, torch.tensor([key])).tolist()


def test_row_without_weight_gets_an_index_within_the_row() -> None:
    """On a GPU an index beyond the row ends the process, not the request."""
    for width in (1, 2, 128, 129, 300):
        rows = torch.stack([torch.zeros(width), torch.zeros(width), torch.full((width,), torch.nan), torch.ones(width)])
        rows[3, -1] = torch.nan
        assert all(0 <= index < width for index in draw(rows, keys_of(4)).tolist())


def test_ranked_weights_return_to_their_ids() -> None:
    gaps = torch.tensor([[2.0, 0.0, 1.0, 3.0], [0.0, 5.0, 4.0, 0.0]])
    best, ids = ranked(gaps, 2)
    assert by_id(best + 1, ids, vocab=4).tolist() == [[0.0, 1.0, 2.0, 0.0], [1.0, 0.0, 0.0, 1.0]]


def test_total_is_exact_to_single_precision_over_a_long_row() -> None:
    weights = torch.full((1, 262_144), 1e-8)
    weights[0, 0] = 1.0
    exact = 1.0 + 262_143 * 1e-8
    assert abs(total(weights).item() - exact) < 1e-6 * exact


@given(gaps=st.lists(st.integers(0, 6).map(float), min_size=1, max_size=60), data=st.data())
@settings(max_examples=100, deadline=None)
def test_ranking_is_by_gap_then_by_id(gaps: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(gaps)))
    values, ids = ranked(torch.tensor([gaps]), count)
    expected = sorted(range(len(gaps)), key=lambda token: (gaps[token], token))[:count]
    assert ids.tolist() == [expected]
    assert values.tolist() == [[gaps[token] for token in expected]]

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.runner.distribution import draw, ranked, total

# A weight of 2**-149 and one of 1 in the same row: what is small may vanish in the sum but must not break it.
weight = st.one_of(st.just(0.0), st.floats(0, 1, width=32), st.just(2.0**-149))
# At the largest number below 1 the target lies as close to the whole sum as it ever does.
number = st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53), st.just(0.0))


@given(weights=st.lists(weight, min_size=1, max_size=300).filter(any), zeros=st.integers(0, 200), uniform=number)
@settings(max_examples=300, deadline=None)
def test_drawn_index_has_weight(weights: list[float], zeros: int, uniform: float) -> None:
    weights = weights + [0.0] * zeros
    [index] = draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert weights[index] > 0


@given(weights=st.lists(st.integers(0, 5).map(float), min_size=1, max_size=300).filter(any), data=st.data())
@settings(max_examples=150, deadline=None)
def test_drawn_index_is_where_the_running_sum_first_exceeds_the_target(
    weights: list[float], data: st.DataObject
) -> None:
    """Small whole weights make every sum exact: a target on an edge belongs to the token that begins there."""
    whole = sum(weights)
    target = data.draw(st.integers(0, int(whole) - 1))
    [index] = draw(torch.tensor([weights]), torch.tensor([(target + 0.5) / whole], dtype=torch.float64)).tolist()
    assert sum(weights[:index]) <= target < sum(weights[: index + 1])


def test_row_without_weight_gets_an_index_within_the_row() -> None:
    """On a GPU an index beyond the row ends the process, not the request."""
    uniforms = torch.tensor([0.0, 0.999, 0.5], dtype=torch.float64)
    for width in (1, 2, 128, 129, 300):
        rows = torch.stack([torch.zeros(width), torch.zeros(width), torch.full((width,), torch.nan)])
        assert all(0 <= index < width for index in draw(rows, uniforms).tolist())


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

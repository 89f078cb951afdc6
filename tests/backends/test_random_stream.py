import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_oracle import uniform

from ostro.backends.sampling.random_key import stream_keys
from ostro.backends.sampling.random_stream import exponentials, stream_key

Key = tuple[int, int, int]


def uniforms(keys: list[Key], count: int) -> torch.Tensor:
    """What the exponentials were made from."""
    return -torch.expm1(-exponentials(torch.tensor([stream_key(*key) for key in keys]), count))


def test_the_streams_never_change_between_releases() -> None:
    """Users keep seeds; a changed stream changes every recorded output."""
    assert [
        stream_key(*key) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 0, 0), (2**63 - 1, 127, 4095)]
    ] == [
        2558736989570252433,
        3400964856525257824,
        4964578127960768432,
        -5653703133376969021,
        -287061555193568806,
        -9216691713763073723,
    ]
    assert exponentials(torch.tensor([0, -1, stream_key(0, 0, 0)]), 3).tolist() == [
        pytest.approx(row, rel=1e-14)
        for row in [
            [2.148241359348383, 0.5648032142311615, 0.02678942524876903],
            [2.2437778419081624, 2.4372280013456873, 0.24779742961432527],
            [0.13885481498435764, 0.05120915652944086, 1.109658180707133],
        ]
    ]


@given(key=st.integers(-(2**63), 2**63 - 1), count=st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_numbers_are_those_of_a_plain_splitmix_and_do_not_depend_on_how_many_are_taken(key: int, count: int) -> None:
    [row] = exponentials(torch.tensor([key]), count).tolist()
    assert row == pytest.approx([-math.log1p(-uniform(key, index)) for index in range(count)], rel=1e-14)


def test_numbers_are_positive_and_finite_even_at_the_ends_of_the_words() -> None:
    """The first word of these streams is 0 and 2**64 - 1: a uniform number nearest 0 and one nearest 1."""
    ends = exponentials(torch.tensor([7046029254386353131, 3558559446808474027]), 1).squeeze(1).tolist()
    assert ends == [pytest.approx(2.0**-53), pytest.approx(53 * math.log(2))]


def test_row_has_the_same_bits_alone_and_among_others() -> None:
    keys = torch.tensor([stream_key(seed, 0, 0) for seed in range(40)])
    together = exponentials(keys, 513)
    assert all(torch.equal(together[row : row + 1], exponentials(keys[row : row + 1], 513)) for row in range(40))


def test_seed_choice_and_position_each_give_another_stream() -> None:
    keys = list(itertools.product((-(2**63), -1, 0, 1, 2, 2**63 - 1), range(16), range(200)))
    assert len({stream_key(*key) for key in keys}) == len(keys)


@pytest.mark.parametrize("step", [(0, 0, 1), (1, 0, 0), (0, 1, 0)], ids=["positions", "seeds", "choices"])
def test_neighbouring_streams_are_uniform_and_uncorrelated(step: Key) -> None:
    numbers = uniforms([(step[0] * i + 3, step[1] * i, step[2] * i) for i in range(20_001)], 4)
    for index in range(4):
        assert_pairs_are_uniform(numbers[:-1, index], numbers[1:, index])
    # Nor does a stream run on where its neighbour began.
    assert_pairs_are_uniform(numbers[:-1, 1], numbers[1:, 0])
    assert_pairs_are_uniform(numbers[:-1, 0], numbers[1:, 1])


@pytest.mark.parametrize("lag", [1, 2, 64, 128])
def test_numbers_of_one_stream_are_uniform_and_uncorrelated(lag: int) -> None:
    numbers = uniforms([(seed, 0, 0) for seed in range(40)], 513 + lag)
    assert_pairs_are_uniform(numbers[:, :-lag].flatten(), numbers[:, lag:].flatten())


def assert_pairs_are_uniform(here: torch.Tensor, there: torch.Tensor) -> None:
    cells = 10
    table = torch.bincount((here * cells).long() * cells + (there * cells).long(), minlength=cells**2)
    expected = len(here) / cells**2
    chi_square = ((table - expected) ** 2 / expected).sum().item()
    # 99 degrees of freedom: six standard deviations of the statistic.
    assert chi_square < 99 + 6 * math.sqrt(2 * 99)
    correlation = torch.corrcoef(torch.stack((here, there)))[0, 1].item()
    assert abs(correlation) < 6 / math.sqrt(len(here))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_numbers_that_the_cpu_gives() -> None:
    keys = torch.tensor([stream_key(seed, 0, 0) for seed in range(64)])
    torch.testing.assert_close(exponentials(keys.cuda(), 1315).cpu(), exponentials(keys, 1315), rtol=1e-14, atol=0.0)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64), st.integers(0, 200), st.integers(0, 2**20)), min_size=1))
def test_many_keys_at_once_are_those_of_one_at_a_time(streams: list[Key]) -> None:
    assert stream_keys(streams).tolist() == [stream_key(*stream) for stream in streams]

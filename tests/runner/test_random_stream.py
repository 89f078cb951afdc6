import itertools
import math

from ostro.runner.random_stream import uniform


def test_numbers_lie_from_zero_to_just_below_one() -> None:
    numbers = [
        uniform(seed, choice, position) for seed in range(-50, 50) for choice in (0, 7) for position in range(20)
    ]
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_stream_never_changes_between_releases() -> None:
    """Users keep seeds; a changed stream changes every recorded output."""
    assert [
        uniform(*key) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 0, 0), (2**63 - 1, 127, 4095)]
    ] == [
        0.13870941014555427,
        0.18436667429957676,
        0.2691303195904541,
        0.6935121390102292,
        0.9844383619111032,
        0.5003621410404464,
    ]


def test_seed_choice_and_position_each_give_another_number() -> None:
    keys = list(itertools.product((-(2**63), -1, 0, 1, 2, 2**63 - 1), range(16), range(200)))
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_neighbouring_positions_seeds_and_choices_are_uniform_and_uncorrelated() -> None:
    count, cells = 20_000, 10
    for step in ((0, 0, 1), (1, 0, 0), (0, 1, 0)):
        keys = [(step[0] * i + 3, step[1] * i, step[2] * i) for i in range(count + 1)]
        numbers = [uniform(*key) for key in keys]
        table = [[0] * cells for _ in range(cells)]
        for here, there in itertools.pairwise(numbers):
            table[int(here * cells)][int(there * cells)] += 1
        expected = count / cells**2
        chi_square = sum((seen - expected) ** 2 / expected for row in table for seen in row)
        # 99 degrees of freedom: six standard deviations of the statistic.
        assert chi_square < 99 + 6 * math.sqrt(2 * 99)

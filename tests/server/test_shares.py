from collections.abc import Sequence

import pytest

from ostro.server.admission.shares import Shares


def filled(shares: Shares, key: str) -> int:
    """The share of a key that takes all it can."""
    count = 0
    while shares.has_room(key) and count < 10_000:
        shares.take(key)
        count += 1
    return count


def test_single_key_may_use_all() -> None:
    assert filled(Shares(10), "alone") == 10


@pytest.mark.parametrize(("total", "num_keys"), [(10, 2), (100, 3), (512, 7), (1536, 2)])
def test_greedy_keys_leave_every_other_key_its_part(total: int, num_keys: int) -> None:
    shares = Shares(total, num_keys=num_keys)
    greedy, *others = (f"key-{number}" for number in range(num_keys))
    first = filled(shares, greedy)
    assert first >= total // 2
    assert all(filled(shares, key) == max(1, total // (2 * num_keys)) for key in others)
    assert shares.used <= total


@pytest.mark.parametrize("num_keys", [2, 10, 64, 100, 128, 1000])
def test_key_that_is_alone_in_using_the_server_gets_at_least_half_however_many_there_are(num_keys: int) -> None:
    """It got 29 of 128 slots with 100 keys, and one with 128 keys."""
    assert filled(Shares(128, num_keys=num_keys), "alone") >= 64


def test_more_keys_than_there_is_to_share_still_get_one_each() -> None:
    shares = Shares(2, num_keys=5)
    assert [filled(shares, f"key-{number}") for number in range(5)] == [2, 1, 1, 1, 1]


def test_amount_that_is_larger_than_everything_is_taken_by_a_key_that_has_nothing() -> None:
    shares = Shares(10, num_keys=2)
    assert shares.has_room("a", 1000)
    shares.take("a", 1000)
    assert not shares.has_room("a")
    assert filled(shares, "b") == 2


def test_returned_shares_are_available_again() -> None:
    shares = Shares(10, num_keys=2)
    order: Sequence[str] = ("a", "b")
    before = [filled(shares, key) for key in order]
    for key, amount in zip(order, before, strict=True):
        shares.give_back(key, amount)
    assert shares.used == 0
    assert [filled(shares, key) for key in order] == before

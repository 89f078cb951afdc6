from dataclasses import replace

import pytest
from engine_driver import make_request

from ostro.engine_process.suspects import Suspects
from ostro.errors import RequestRefused

KILLER = make_request(1, [1, 2, 3])


def is_refused(suspects: Suspects, id: int = 9) -> bool:
    try:
        suspects.check(replace(KILLER, id=id, seed=id, turn=id, tenant=str(id), cache_salt=str(id)))
    except RequestRefused:
        return True
    return False


def test_request_seen_at_two_crashes_is_refused_whatever_its_id() -> None:
    suspects = Suspects()
    suspects.blame([KILLER])
    assert not is_refused(suspects)
    suspects.blame([replace(KILLER, id=2, seed=5)])
    assert is_refused(suspects)
    suspects.check(make_request(3, [1, 2, 4]))
    suspects.check(make_request(4, [1, 2, 3], max_tokens=5))


def test_request_that_came_to_its_end_is_cleared() -> None:
    suspects = Suspects()
    suspects.blame([KILLER])
    suspects.clear(KILLER)
    suspects.blame([KILLER])
    assert not is_refused(suspects)


def test_refusal_expires() -> None:
    now = 0.0
    suspects = Suspects(clock=lambda: now)
    suspects.blame([KILLER])
    suspects.blame([KILLER])
    with pytest.raises(RequestRefused, match=r"died 2 times .* for 10 min"):
        suspects.check(KILLER)
    now = 601.0
    suspects.check(KILLER)
    suspects.blame([KILLER])
    assert not is_refused(suspects)


def test_no_more_are_remembered_than_there_is_room_for() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.blame([KILLER])
    for _ in range(2):
        suspects.blame(make_request(id, [4, id]) for id in range(5000))
    assert not is_refused(suspects)
    with pytest.raises(RequestRefused):
        suspects.check(make_request(1, [4, 4999]))

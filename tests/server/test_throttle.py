import asyncio
from collections.abc import Callable

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from ostro.errors import TooManyAttempts
from ostro.server.admission.auth import Authentication, Keyring, Throttle, network_of


async def reached(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("reached")(scope, receive, send)


def statuses(keys: list[str | None], *, address: Callable[[int], str] = lambda _: "10.0.0.1") -> list[int]:
    """Statuses of consecutive requests, each with its key and from its address."""
    app = Authentication(reached, Keyring.of(["right", "other"]))

    async def ask() -> list[int]:
        found = []
        for number, key in enumerate(keys):
            transport = httpx.ASGITransport(app=app, client=(address(number), 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                found.append((await client.get("/v1/models", headers=headers)).status_code)
        return found

    return asyncio.run(ask())


def test_address_that_guesses_keys_must_wait() -> None:
    """Every 401 was free."""
    found = statuses([f"guess-{number}" for number in range(25)])
    assert found == [401] * 20 + [429] * 5


def test_right_key_is_served_beside_a_guesser_of_the_same_address() -> None:
    """Behind a proxy, one guesser locked out everybody whose key had not been seen before."""
    guesses = [f"guess-{number}" for number in range(30)]
    assert statuses(["right", *guesses, "right", "other"])[-2:] == [200, 200]


def test_missing_key_is_no_guess_and_other_addresses_are_not_held_up() -> None:
    assert statuses([None] * 30 + ["right"])[-1] == 200
    guesses = [f"guess-{number}" for number in range(30)]
    assert statuses([*guesses, "right"], address=lambda number: f"10.0.0.{1 + number // 30}")[-1] == 200


def test_attempts_come_back_one_by_one() -> None:
    now = 0.0
    throttle = Throttle(clock=lambda: now)
    for _ in range(20):
        throttle.fail("a")
    with pytest.raises(TooManyAttempts) as refusal:
        throttle.fail("a")
    assert (refusal.value.http_status, refusal.value.retry_after) == (429, 3)
    now = 3.0
    throttle.fail("a")
    with pytest.raises(TooManyAttempts):
        throttle.fail("a")
    now = 6.0
    throttle.fail("a")


def test_memory_of_addresses_is_bounded() -> None:
    throttle = Throttle()
    for _ in range(20):
        throttle.fail("first")
    for number in range(5000):
        throttle.fail(f"address-{number}")
    throttle.fail("first")


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, ""),
        ("not:an:address", "not:an:address"),
    ],
)
def test_addresses_of_one_ipv6_network_count_as_one(host: str | None, network: str) -> None:
    assert network_of(host) == network

"""How often an address may be wrong about a key. Knows addresses; knows no keys.

Every address has a few attempts, and gets a new one every few seconds. Once they are used up, wrong keys are answered
by 429 and a time to wait. A right key is never held up: many clients may share an address, behind a proxy for one, and
a guesser among them must not lock the others out. So it is a key's length, not this, that makes guessing hopeless.
"""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ostro.errors import TooManyAttempts

_ATTEMPTS: Final = 20
_SECONDS_EACH: Final = 3.0
_MOST_ADDRESSES: Final = 4096
# One user of IPv6 has as many addresses as they like, but one network.
_NETWORK_BITS: Final = 64


@dataclass(slots=True)
class _Visitor:
    attempts: float
    at: float


class Throttle:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The one that was heard of last is last.
        self._visitors: OrderedDict[str, _Visitor] = OrderedDict()

    def fail(self, address: str) -> None:
        """It came with a key that nobody knows. Raises TooManyAttempts if that was one too many."""
        visitor = self._visitor(address)
        self._check(visitor)
        visitor.attempts -= 1

    def _visitor(self, address: str) -> _Visitor:
        now = self._clock()
        visitor = self._visitors.setdefault(address, _Visitor(_ATTEMPTS, now))
        self._visitors.move_to_end(address)
        if len(self._visitors) > _MOST_ADDRESSES:
            self._visitors.popitem(last=False)
        visitor.attempts = min(_ATTEMPTS, visitor.attempts + (now - visitor.at) / _SECONDS_EACH)
        visitor.at = now
        return visitor

    def _check(self, visitor: _Visitor) -> None:
        if visitor.attempts < 1:
            raise TooManyAttempts(
                "Too many wrong API keys have come from your address. Check the key, and try again in a few seconds.",
                retry_after=math.ceil((1 - visitor.attempts) * _SECONDS_EACH),
            )


def network_of(host: str | None) -> str:
    """What attempts are counted by."""
    if host is None or ":" not in host:
        return host or ""
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], _NETWORK_BITS), strict=False))
    except ValueError:
        return host

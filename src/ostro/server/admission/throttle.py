"""Limits how many wrong keys an address may send. Knows addresses; knows no keys.

Every address has a few attempts, and gets a new one every few seconds. Once they are used up, a wrong key gets 429 and
Retry-After. A valid key is never delayed: many clients may share an address, for example behind a proxy, and one that
guesses must not lock out the others. So guessing is made infeasible by the length of keys, not by this limit.
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
# An IPv6 user has any number of addresses, but one network.
_NETWORK_BITS: Final = 64


@dataclass(slots=True)
class _Visitor:
    attempts: float
    at: float


class Throttle:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Least recently seen first.
        self._visitors: OrderedDict[str, _Visitor] = OrderedDict()

    def fail(self, address: str) -> None:
        """Counts a wrong key from this address. Raises TooManyAttempts if no attempts are left."""
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
    """The network that attempts are counted by: an IPv4 address or an IPv6 prefix."""
    if host is None or ":" not in host:
        return host or ""
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], _NETWORK_BITS), strict=False))
    except ValueError:
        return host

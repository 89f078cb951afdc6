"""Requests that were running when an engine died. Knows digests of their contents; knows no processes.

A request that crashes the engine would do so again, and clients retry what failed: every retry takes all other requests
down with it. So a request that was running in two crashes is refused for a while. After the first crash it is unknown
which of several was at fault, so the engine then runs suspects one at a time, and a second crash identifies the
culprit. A suspect that finishes is cleared.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from ostro.engine.request import Request
from ostro.errors import RequestRefused

_MOST_DEATHS: Final = 2
_SECONDS: Final = 600.0
_MOST_REMEMBERED: Final = 4096

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Record:
    deaths: int
    until: float


class Suspects:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Oldest first.
        self._records: dict[bytes, _Record] = {}

    def check(self, request: Request) -> bool:
        """Whether it is a suspect. Raises RequestRefused for one that must not reach the engine again."""
        record = self._records.get(_digest(request)) if self._records else None
        if record is None:
            return False
        left = record.until - self._clock()
        if left <= 0:
            return False
        if record.deaths >= _MOST_DEATHS:
            raise RequestRefused(
                f"The engine died {record.deaths} times while working on this request, so it is not run again "
                f"for {max(1, round(left / 60))} min. Change it, and tell the server's operator: the log says more."
            )
        return True

    def blame(self, requests: Iterable[Request]) -> None:
        """Records that these were running when the engine died."""
        now = self._clock()
        for request in requests:
            digest = _digest(request)
            known = self._records.pop(digest, None)
            deaths = known.deaths + 1 if known is not None and known.until > now else 1
            self._records[digest] = _Record(deaths, now + _SECONDS)
        while len(self._records) > _MOST_REMEMBERED:
            del self._records[next(iter(self._records))]

    def clear(self, request: Request) -> None:
        """Records that the request finished without harm."""
        if self._records:
            self._records.pop(_digest(request), None)


def _digest(request: Request) -> bytes:
    """Digest of what decides the engine's computation, without the resolved seed: a retry may draw another one."""
    plain = replace(request, id=0, seed=0, eos_ids=frozenset(), cache_salt="", priority=0, turn=0, tenant="")
    return hashlib.blake2b(_encode(plain), digest_size=16).digest()

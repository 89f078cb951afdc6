"""What a replica reports to routers about itself. Knows digests and names; knows no choices.

Reports may be repeated or lost, and routers may join at any time. So a report holds a replica's state rather than
changes to it, with counts from which a router finds what is new to it.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from ostro.routing.key import DIGEST_BYTES, levels_of

_DIGEST = struct.Struct(f"{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest of a series of prefixes, without repetitions."""

    digests: bytes = b""
    """Digests, concatenated, latest last: reports are compared and copied more often than read."""
    num_ever: int = 0
    """Length of the whole series, repetitions included."""

    @classmethod
    def of(cls, prefixes: Iterable[bytes], num_ever: int) -> "Latest":
        return cls(b"".join(prefixes), num_ever)

    def since(self, num_before: int, most: int | None = None) -> list[bytes]:
        """Prefixes that came after the first `num_before`, and maybe some earlier ones; the latest `most` of them."""
        new = self.num_ever - num_before
        if new < 0:  # The replica restarted and counts from zero.
            new = self.num_ever
        begin = max(0, len(self.digests) - DIGEST_BYTES * (new if most is None else min(new, most)))
        return [digest for (digest,) in _DIGEST.iter_unpack(self.digests[begin:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    load: int = 0
    """The replica's requests, waiting and running, whichever router sent them."""
    models: frozenset[str] = frozenset()
    """Names of its loaded models, as requests may give them."""
    num_models: int = 0
    is_ready: bool = True
    """Whether its engine accepts requests, i.e. is not restarting."""
    held: Latest = Latest()
    """Prefixes that were used and are in its cache."""
    dropped: Latest = Latest()
    """Prefixes that it no longer has."""

    def to_builtins(self) -> dict[str, object]:
        """The report as builtins, for processes on the way that may not have this package."""
        told: dict[str, object] = msgspec.to_builtins(self, builtin_types=(bytes,), order="deterministic")
        return told

    @classmethod
    def from_builtins(cls, told: object) -> "Report":
        return msgspec.convert(told, cls, builtin_types=(bytes,))


MOST_HELD, MOST_DROPPED = 512, 256


class HotPrefixes:
    """What a replica's prefix cache holds, in the digests that requests are routed by.

    Routers see text and caches hold tokens, so a replica keeps this list beside its cache: prompts enter it when they
    have been answered. Once it holds more than the cache has room for, they leave it in the cache's own order: least
    recently used first, ends before beginnings.
    """

    def __init__(self) -> None:
        # Prefix -> how many blocks it adds to the next shorter one; most recently used last.
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        self._num_used = self._num_dropped = 0
        self.num_blocks = 0
        self.total_blocks = 0
        """Blocks of all prompts that this cache has seen."""

    def use(self, blocks: Sequence[bytes]) -> None:
        """Notes that a prompt has been answered, so that all of it is in the cache."""
        self.total_blocks += len(blocks)
        levels = levels_of(len(blocks))
        for before, level in reversed([*zip((0, *levels), levels, strict=False)]):
            prefix = blocks[level - 1]
            if prefix not in self._held:
                self._held[prefix] = level - before
                self.num_blocks += level - before
                self._dropped.pop(prefix, None)
            self._held.move_to_end(prefix)
            self._num_used += 1

    def shrink(self, most_blocks: float) -> None:
        """Drops what the cache has no room for."""
        while self._held and self.num_blocks > most_blocks:
            prefix, size = self._held.popitem(last=False)
            self.num_blocks -= size
            self._dropped[prefix] = None
            self._num_dropped += 1
            if len(self._dropped) > MOST_DROPPED:
                self._dropped.popitem(last=False)

    def forget(self) -> None:
        """Starts over, because the cache is new and empty."""
        self.shrink(0)
        self.total_blocks = 0

    def held(self) -> Latest:
        """The most recently used prefixes."""
        return Latest.of(reversed(list(islice(reversed(self._held), MOST_HELD))), self._num_used)

    def dropped(self) -> Latest:
        """The prefixes dropped most recently."""
        return Latest.of(self._dropped, self._num_dropped)

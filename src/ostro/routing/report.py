"""What a replica tells routers of itself, now and then. Knows digests and names; knows no choices.

Reports may be repeated or left out on the way, and routers come at any time. So a report holds a replica's state rather
than changes to it, and counts by which a router finds what is new to it.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ostro.routing.key import DIGEST_BYTES

_DIGEST = struct.Struct(f"{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest of a series of prefixes, each of them once."""

    digests: bytes = b""
    """All in one piece, the very latest last: reports are compared and copied more often than read."""
    num_ever: int = 0
    """How many there have been, counting a prefix each time."""

    @classmethod
    def of(cls, prefixes: Iterable[bytes], num_ever: int) -> "Latest":
        return cls(b"".join(prefixes), num_ever)

    def since(self, num_before: int, most: int | None = None) -> list[bytes]:
        """All here that came after the first `num_before`, and maybe some earlier ones; the latest `most` of them."""
        new = self.num_ever - num_before
        if new < 0:  # It started to count again.
            new = self.num_ever
        begin = max(0, len(self.digests) - DIGEST_BYTES * (new if most is None else min(new, most)))
        return [digest for (digest,) in _DIGEST.iter_unpack(self.digests[begin:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    load: int = 0
    """Its requests, waiting and running, whoever sent them."""
    models: frozenset[str] = frozenset()
    """Names under which requests can ask for what it has loaded."""
    num_models: int = 0
    is_ready: bool = True
    """Whether its engine accepts requests, i.e. is not restarting."""
    held: Latest = Latest()
    """Prefixes that it has used, and has in its cache."""
    dropped: Latest = Latest()
    """Prefixes that it has no more."""

    def to_builtins(self) -> dict[str, object]:
        """For processes on the way that may not have this package."""
        told: dict[str, object] = msgspec.to_builtins(self, builtin_types=(bytes,), order="deterministic")
        return told

    @classmethod
    def from_builtins(cls, told: object) -> "Report":
        return msgspec.convert(told, cls, builtin_types=(bytes,))

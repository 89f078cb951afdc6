"""Chooses a replica for a request: the one that has its model loaded and its prefix computed, unless that one is much
busier than another. Knows digests and loads; knows no Ray and no text.

The contents of a replica's prefix cache are inferred from the requests sent to it, not queried.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A replica is too busy if its load exceeds the lowest by both this factor and this number of requests.
_MUCH_MORE, _SOME_MORE = 1.5, 8
# Shorter matches are not worth queueing for: every conversation may start with the same few words.
_LEAST_SHARE = 0.5


class PrefixIndex:
    """Which replicas were sent which prefixes recently, up to a number of blocks."""

    def __init__(self, most_blocks: int = 1 << 16) -> None:
        self._most = most_blocks
        self._replicas: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, blocks: Sequence[bytes], replica: str) -> None:
        # In reverse, so that shared beginnings are forgotten after the endings.
        for block in reversed(blocks):
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def matches(self, blocks: Iterable[bytes]) -> dict[str, int]:
        """For each replica, how many leading blocks it was sent without a gap."""
        found: dict[str, int] = {}
        holders: set[str] | None = None
        for number, block in enumerate(blocks, 1):
            known = self._replicas.get(block, set())
            holders = known if holders is None else holders & known
            if not holders:
                break
            for replica in holders:
                found[replica] = number
        return found

    def forget(self, gone: Iterable[str]) -> None:
        """Forgets replicas that are gone."""
        missing = set(gone)
        for block in [block for block, replicas in self._replicas.items() if replicas & missing]:
            self._replicas[block] -= missing
            if not self._replicas[block]:
                del self._replicas[block]


@dataclass(frozen=True, slots=True)
class Candidate:
    replica: str
    load: int
    """Its requests, waiting and running."""
    matched: int = 0
    """Leading blocks of the prompt that it was sent before."""
    has_model: bool = True
    num_models: int = 1
    is_ready: bool = True
    """Whether its engine accepts requests, i.e. is not restarting."""


def ranked(candidates: Sequence[Candidate], num_history: int, dice: random.Random) -> list[str]:
    """Replicas, best first. `num_history` is the number of blocks that could have been sent before."""
    least = min((each.load for each in candidates if each.is_ready), default=0)

    def rank(each: Candidate) -> tuple[object, ...]:
        is_worth = each.matched >= max(1, _LEAST_SHARE * num_history)
        return (
            not each.is_ready,
            each.load > _MUCH_MORE * least + _SOME_MORE,
            not each.has_model,
            -each.matched if is_worth else 0,
            each.load,
            # Tie-breakers: minor preferences, then chance.
            -each.matched,
            each.num_models,
            dice.random(),
        )

    return [each.replica for each in sorted(candidates, key=rank)]

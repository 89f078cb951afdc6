"""Which replicas hold which prefixes, as far as is known. Knows digests and names; knows no loads.

Bounded both ways: the prefixes used longest ago are forgotten, and of a prefix that many replicas hold, only the latest
few are remembered. A replica that holds a prefix holds every shorter one, whether remembered there or not.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from ostro.routing.key import levels_of

MOST_PREFIXES = 1 << 18
MOST_HOLDERS = 4


class PrefixIndex:
    def __init__(self, most_prefixes: int = MOST_PREFIXES) -> None:
        self._most = most_prefixes
        # Holders are in the order in which they were added, the latest last.
        self._holders: OrderedDict[bytes, list[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add_prompt(self, blocks: Sequence[bytes], replica: str) -> None:
        # In reverse, so that shared beginnings are forgotten after the endings.
        self.add([blocks[level - 1] for level in reversed(levels_of(len(blocks)))], replica)

    def add(self, prefixes: Iterable[bytes], replica: str) -> None:
        holders_of = self._holders
        for prefix in prefixes:
            holders = holders_of.get(prefix)
            if holders is None:
                holders_of[prefix] = [replica]
                continue
            holders_of.move_to_end(prefix)
            if holders[-1] != replica:
                if replica in holders:
                    holders.remove(replica)
                elif len(holders) == MOST_HOLDERS:
                    del holders[0]
                holders.append(replica)
        while len(holders_of) > self._most:
            holders_of.popitem(last=False)

    def discard(self, prefix: bytes, replica: str) -> None:
        holders = self._holders.get(prefix)
        if holders is not None and replica in holders:
            holders.remove(replica)
            if not holders:
                del self._holders[prefix]

    def matches(self, blocks: Sequence[bytes], among: Container[str]) -> dict[str, int]:
        """A few replicas of `among` with the longest matches: how many leading blocks each holds.

        Exact if all of `blocks` was a prompt itself, as before an answer. Matches below half the longest are left out.
        """
        levels = levels_of(len(blocks))
        # What is known of a prefix is known of the shorter ones, so the longest known one can be bisected.
        num_known = bisect_left(levels, True, key=lambda level: blocks[level - 1] not in self._holders)
        found: dict[str, int] = {}
        for level in reversed(levels[:num_known]):
            if 2 * level < levels[num_known - 1]:
                break
            for replica in reversed(self._holders.get(blocks[level - 1], ())):
                if replica not in found and replica in among:
                    found[replica] = level
            if len(found) >= MOST_HOLDERS:
                break
        return found

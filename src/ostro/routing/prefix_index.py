"""Which replicas are known to hold which prefixes. Knows digests and names; knows no loads.

Bounded both ways: the least recently used prefixes are forgotten, and for a prefix that many replicas hold, only the
latest few are remembered. A replica that holds a prefix holds every shorter one, whether remembered there or not.
"""

from bisect import bisect_left
from collections.abc import Container, Sequence

from ostro.routing.key import levels_of

# At least half of these are kept: those that an LRU of 1 << 18 would keep, in less memory.
MOST_PREFIXES = 1 << 19
MOST_HOLDERS = 4

# The latest last. Prefixes that are added together share a tuple, which takes far less memory than one for each.
_Holders = tuple[str, ...]


class PrefixIndex:
    """Two generations, each of half the prefixes: once the young one is full, it takes the place of the old one, whose
    prefixes are forgotten unless they have been used again. That is cheaper than tracking recency. A prefix is in one
    generation only.
    """

    def __init__(self, most_prefixes: int = MOST_PREFIXES) -> None:
        self.most_prefixes = most_prefixes
        self._young: dict[bytes, _Holders] = {}
        self._old: dict[bytes, _Holders] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add_prompt(self, blocks: Sequence[bytes], replica: str) -> None:
        self.add([blocks[level - 1] for level in levels_of(len(blocks))], replica)

    def add(self, prefixes: Sequence[bytes], replica: str) -> None:
        """Adds the prefixes together: at most half of what the index holds."""
        room = self.most_prefixes // 2 - len(self._young)
        # Decided before any is added, because a prompt's prefixes must be forgotten together. Rarely counts them.
        if len(prefixes) > room and sum(prefix not in self._young for prefix in prefixes) > room:
            self._young, self._old = {}, self._young
        young, old = self._young, self._old
        before: _Holders = ()
        after: _Holders = (replica,)
        for prefix in prefixes:
            holders = young[prefix] if prefix in young else old.pop(prefix, ())
            if holders is not before:
                before, after = holders, _with(holders, replica)
            young[prefix] = after

    def discard(self, prefix: bytes, replica: str) -> None:
        generation = self._young if prefix in self._young else self._old
        if replica in (holders := generation.get(prefix, ())):
            if others := tuple(each for each in holders if each != replica):
                generation[prefix] = others
            else:
                del generation[prefix]

    def matches(self, blocks: Sequence[bytes], among: Container[str]) -> dict[str, int]:
        """A few replicas of `among` with the longest matches: how many leading blocks each holds.

        Exact if all of `blocks` was itself a prompt, as it is before an answer. Matches below half the longest are left
        out.
        """
        levels, young, old = levels_of(len(blocks)), self._young, self._old
        # If a prefix is known, so are all shorter ones: bisection finds the longest.
        num_known = bisect_left(
            levels, True, key=lambda level: blocks[level - 1] not in young and blocks[level - 1] not in old
        )
        found: dict[str, int] = {}
        before: _Holders = ()
        for level in reversed(levels[:num_known]):
            if 2 * level < levels[num_known - 1]:
                break
            prefix = blocks[level - 1]
            holders = young.get(prefix) or old.get(prefix, ())
            if holders is before:
                continue
            before = holders
            for replica in reversed(holders):
                if replica not in found and replica in among:
                    found[replica] = level
            if len(found) >= MOST_HOLDERS:
                break
        return found


def _with(holders: _Holders, replica: str) -> _Holders:
    return (*[each for each in holders if each != replica][1 - MOST_HOLDERS :], replica)

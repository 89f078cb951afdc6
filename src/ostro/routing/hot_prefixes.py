"""What a replica's prefix cache holds, in the digests that requests are routed by. Knows no tokens and no pages.

Routers see text and caches hold tokens, so a replica keeps this list beside its cache: prompts enter it when they have
been answered, and leave it in the cache's own order, the longest unused first and ends before beginnings, once it holds
more than the cache has room for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from ostro.routing.key import levels_of
from ostro.routing.report import Latest

MOST_HELD, MOST_DROPPED = 512, 256


class HotPrefixes:
    def __init__(self) -> None:
        # By prefix, how many blocks it adds to the next shorter one; the latest used last.
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        self._num_used = self._num_dropped = 0
        self.num_blocks = 0
        self.total_blocks = 0
        """Of all prompts that this cache has seen."""

    def use(self, blocks: Sequence[bytes]) -> None:
        """A prompt has been answered, so all of it is in the cache."""
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
        """The cache is new and empty."""
        self.shrink(0)
        self.total_blocks = 0

    def held(self) -> Latest:
        """The latest used."""
        return Latest.of(reversed(list(islice(reversed(self._held), MOST_HELD))), self._num_used)

    def dropped(self) -> Latest:
        """The latest that are not held any more."""
        return Latest.of(self._dropped, self._num_dropped)

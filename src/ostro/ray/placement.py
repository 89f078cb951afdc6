"""Which replica a request goes to: where its model is loaded and its prefix computed, unless that one has much more to
do than another. Knows digests and loads; knows no Ray and no text.

What a replica holds in its prefix cache is inferred from what was sent there; it is not asked.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A replica is passed over for its load if it has more requests than this many times the least, and so many more.
_MUCH_MORE, _SOME_MORE = 1.5, 8
# Less of a prompt than this is not worth a queue: every conversation may begin with the same few words.
_LEAST_SHARE = 0.5


class PrefixIndex:
    """Which replicas were sent which prefixes: of the most recent ones, up to a number of blocks."""

    def __init__(self, most_blocks: int = 1 << 16) -> None:
        self._most = most_blocks
        self._replicas: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, blocks: Sequence[bytes], replica: str) -> None:
        # The last one first: what many prefixes begin with is forgotten after what they end with.
        for block in reversed(blocks):
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def matches(self, blocks: Iterable[bytes]) -> dict[str, int]:
        """By replica, how many of the blocks it was sent, from the first on without a gap."""
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
        """Of replicas that are no more."""
        missing = set(gone)
        for block in [block for block, replicas in self._replicas.items() if replicas & missing]:
            self._replicas[block] -= missing
            if not self._replicas[block]:
                del self._replicas[block]


@dataclass(frozen=True, slots=True)
class Candidate:
    replica: str
    load: int
    """Requests that it has, waiting and running."""
    matched: int = 0
    """Blocks of the prompt that it was sent before."""
    has_model: bool = True
    num_models: int = 1
    is_ready: bool = True
    """Its engine accepts requests: it is not restarting."""


def ranked(candidates: Sequence[Candidate], num_history: int, dice: random.Random) -> list[str]:
    """The replicas, the best first. `num_history` is how many blocks could have been sent before."""
    least = min((each.load for each in candidates if each.is_ready), default=0)

    def rank(each: Candidate) -> tuple[object, ...]:
        is_worth = each.matched >= max(1, _LEAST_SHARE * num_history)
        return (
            not each.is_ready,
            each.load > _MUCH_MORE * least + _SOME_MORE,
            not each.has_model,
            -each.matched if is_worth else 0,
            each.load,
            # Equal so far: the smallest reasons, then none.
            -each.matched,
            each.num_models,
            dice.random(),
        )

    return [each.replica for each in sorted(candidates, key=rank)]

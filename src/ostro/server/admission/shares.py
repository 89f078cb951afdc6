"""A capacity that several API keys share, such as slots. Knows keys' labels and amounts; knows no requests.

Half of it is reserved for the keys, in equal parts; the rest is first come, first served:

    [ key 1 | key 2 | key 3 |        common        ]

So a key that takes all it can get leaves every other key its part, and the only active key still gets at least half.
With a single key, everything is common. A key that holds nothing may always take something, even if there are more keys
than parts; unless shares are strict, as those of memory are, whose total is never exceeded.
"""

from collections import Counter
from copy import copy


class Shares:
    def __init__(self, total: int, *, num_keys: int = 1, is_strict: bool = False) -> None:
        self.total = total
        self._is_strict = is_strict
        self._own = total // (2 * num_keys) if num_keys > 1 else 0
        self._common = total - num_keys * self._own
        self._has_several_keys = num_keys > 1
        self._common_used = 0
        self._used: Counter[str] = Counter()
        self.used = 0

    @property
    def most_for_one(self) -> int:
        """What a key can have while the others hold nothing."""
        return self._own + self._common

    @property
    def is_over(self) -> bool:
        """Whether more was taken than there was room for."""
        return self._common_used > self._common

    def empty(self) -> "Shares":
        """The same shares, with nothing taken."""
        fresh = copy(self)
        fresh.used = fresh._common_used = 0
        fresh._used = Counter()
        return fresh

    def used_by(self, key: str) -> int:
        return self._used[key]

    def is_beyond_own(self, key: str) -> bool:
        """Whether the key holds more than the part that is reserved for it."""
        return self._used[key] > self._own

    def has_room(self, key: str, amount: int = 1) -> bool:
        """Whether the key may take this much more. Unless strict: with several keys, one that holds nothing may take
        any amount; a single key may while nothing is in use.
        """
        used = self._used[key]
        if self._is_strict and self.used + amount > self.total:
            return False
        if not self._is_strict and not (used if self._has_several_keys else self.used):
            return True
        from_common = self._beyond_own(used + amount) - self._beyond_own(used)
        return not from_common or self._common_used + from_common <= self._common

    def take(self, key: str, amount: int = 1) -> None:
        """Takes the amount, whether or not there is room."""
        before = self._used[key]
        after = before + amount
        self._common_used += self._beyond_own(after) - self._beyond_own(before)
        self.used += amount
        if after:
            self._used[key] = after
        else:
            del self._used[key]

    def give_back(self, key: str, amount: int = 1) -> None:
        self.take(key, -amount)

    def _beyond_own(self, amount: int) -> int:
        return max(0, amount - self._own)

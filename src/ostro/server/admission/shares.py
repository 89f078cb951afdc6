"""A capacity that several API keys share, such as slots. Knows keys' labels and amounts; knows no requests.

Half of it is reserved for the keys, in equal parts; the rest is first come, first served:

    [ key 1 | key 2 | key 3 |        common        ]

So a key that takes all it can get leaves every other key its part, and the only active key still gets at least half. A
key that holds nothing may always take something, even if there are more keys than parts. With a single key, everything
is common.
"""

from collections import Counter


class Shares:
    def __init__(self, total: int, *, num_keys: int = 1) -> None:
        self._own = total // (2 * num_keys) if num_keys > 1 else 0
        self._common = total - num_keys * self._own
        self._has_several_keys = num_keys > 1
        self._common_used = 0
        self._used: Counter[str] = Counter()
        self.used = 0

    def used_by(self, key: str) -> int:
        return self._used[key]

    def has_room(self, key: str, amount: int = 1) -> bool:
        """Whether the key may take this much more. With several keys, one that holds nothing may take any amount; a
        single key may while nothing is in use.
        """
        used = self._used[key]
        if not (used if self._has_several_keys else self.used):
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

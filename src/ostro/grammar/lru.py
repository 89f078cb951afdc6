"""An LRU cache that is limited by entries and by total weight."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Safe to share between threads."""

    def __init__(self, max_entries: int, max_weight: int) -> None:
        self._max_entries, self._max_weight = max_entries, max_weight
        self._weight = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Does not store a value that alone exceeds the total weight allowed."""
        if weight > self._max_weight:
            return
        with self._lock:
            _, replaced = self._entries.pop(key, (None, 0))
            self._entries[key] = value, weight
            self._weight += weight - replaced
            while len(self._entries) > self._max_entries or self._weight > self._max_weight:
                _, (_, freed) = self._entries.popitem(last=False)
                self._weight -= freed

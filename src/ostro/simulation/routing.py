"""Which of the simulated replicas gets a request."""

from heapq import heappop, heappush
from typing import Literal, Protocol

Routing = Literal["round-robin", "least-loaded"]


class Router(Protocol):
    def choose(self, prompt_ids: tuple[int, ...]) -> int:
        """The number of the replica that gets this request."""
        ...

    def ended(self, replica: int) -> None:
        """One of the replica's requests has ended."""
        ...


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._next = -1

    def choose(self, prompt_ids: tuple[int, ...]) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next

    def ended(self, replica: int) -> None:
        pass


class LeastLoaded:
    """The replica with the fewest requests; of several, the one that has had none for longest."""

    def __init__(self, replicas: int) -> None:
        self._loads = [0] * replicas
        # (load, number of the change that led to it, replica); stale once the replica has changed again.
        self._line = [(0, replica, replica) for replica in range(replicas)]
        self._latest = list(range(replicas))
        self._changes = replicas

    def choose(self, prompt_ids: tuple[int, ...]) -> int:
        while True:
            _, change, replica = heappop(self._line)
            if self._latest[replica] == change:
                self._change(replica, +1)
                return replica

    def ended(self, replica: int) -> None:
        self._change(replica, -1)

    def _change(self, replica: int, difference: int) -> None:
        self._loads[replica] += difference
        self._changes += 1
        self._latest[replica] = self._changes
        heappush(self._line, (self._loads[replica], self._changes, replica))


def router(name: Routing, replicas: int) -> Router:
    return RoundRobin(replicas) if name == "round-robin" else LeastLoaded(replicas)

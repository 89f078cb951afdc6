"""Which of the simulated replicas gets a request: by the router that serves, or by simpler rules to compare it with."""

import hashlib
import random
from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Literal, Protocol

from ostro.routing.key import DIGEST_BYTES, MOST_BLOCKS, Key
from ostro.routing.report import Report
from ostro.routing.router import Router
from ostro.simulation.prompts import Prompt

Routing = Literal["prefix", "least-loaded", "round-robin"]

# Tokens per block: about as much text as a block of the router has.
_BLOCK = 32
_MODEL = "model"


class Chooser(Protocol):
    def choose(self, prompt: Prompt) -> int:
        """The number of the replica that gets this request."""
        ...

    def ended(self, replica: int) -> None:
        """One of the replica's requests has ended."""
        ...


class ByPrefix:
    """The router of `ostro.routing`, which sees digests of tokens here instead of text."""

    def __init__(self, replicas: int, now: Callable[[], float]) -> None:
        self._router = Router(now=now, dice=random.Random(0))
        for replica in range(replicas):
            self._router.report(str(replica), Report(models=frozenset({_MODEL}), num_models=1))

    def choose(self, prompt: Prompt) -> int:
        chosen = self._router.choose(Key(_MODEL, _blocks(prompt.token_ids), prompt.num_history // _BLOCK))
        assert chosen is not None, "there is at least one replica"
        return int(chosen)

    def ended(self, replica: int) -> None:
        self._router.finished(str(replica))


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._next = -1

    def choose(self, prompt: Prompt) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next

    def ended(self, replica: int) -> None:
        pass


class LeastLoaded:
    """The replica with the fewest requests; among equals, the one whose load changed longest ago."""

    def __init__(self, replicas: int) -> None:
        self._loads = [0] * replicas
        # (load, number of the change that led to it, replica); stale once the replica has changed again.
        self._line = [(0, replica, replica) for replica in range(replicas)]
        self._latest = list(range(replicas))
        self._changes = replicas

    def choose(self, prompt: Prompt) -> int:
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


def chooser(routing: Routing, replicas: int, now: Callable[[], float]) -> Chooser:
    """`now` is the clock of the simulation."""
    if routing == "prefix":
        return ByPrefix(replicas, now)
    return LeastLoaded(replicas) if routing == "least-loaded" else RoundRobin(replicas)


def _blocks(token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
    """A chain of digests, each over everything before it."""
    last, found = b"", []
    for begin in range(0, min(len(token_ids) // _BLOCK, MOST_BLOCKS) * _BLOCK, _BLOCK):
        block = array("Q", token_ids[begin : begin + _BLOCK]).tobytes()
        last = hashlib.blake2b(last + block, digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return tuple(found)

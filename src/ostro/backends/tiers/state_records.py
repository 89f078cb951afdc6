"""Recurrent states as records of pages: a state is cut into parts of a page's size, which a disk keeps like any others.
Knows no disk.

    state     [ part 0 | part 1 | part 2 … ]       the last is filled up with zeros
    digests     its own  …1       …2

So files and bundles need no second kind of record. A state of which any part is missing is not there.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from ostro.backends.tiers.page_file import Bytes


class HostStates(Protocol):
    """A runner's slots for states, in host memory."""

    @property
    def state_bytes(self) -> int: ...

    def state(self, slot: int) -> Bytes:
        """A view of a slot's memory."""

    def note_overwritten(self, slot: int) -> None:
        """The slot is about to get another state, by no step's doing."""


class StateRecords:
    def __init__(self, state_bytes: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.num_parts = -(-state_bytes // page_bytes)

    def digests(self, digest: bytes) -> Iterator[bytes]:
        """One for each part of the state with this digest."""
        yield digest
        for number in range(1, self.num_parts):
            yield blake2b(number.to_bytes(4, "little") + digest, digest_size=len(digest)).digest()

    def part(self, state: Bytes, number: int) -> Bytes:
        """A copy of a part, to be written."""
        part = self._part(state, number)
        return np.concatenate([part, np.zeros(self._page_bytes - len(part), np.uint8)])

    def copies(self, state: Bytes) -> list[Bytes]:
        """Copies of all parts."""
        return [self.part(state, number) for number in range(self.num_parts)]

    def targets(self, state: Bytes) -> list[Bytes]:
        """Where its parts are to be read to: the last beside the state, from where `complete` takes it."""
        last = np.empty(self._page_bytes, np.uint8)
        return [*(self._part(state, number) for number in range(self.num_parts - 1)), last]

    def complete(self, state: Bytes, targets: Sequence[Bytes]) -> None:
        """All parts have been read to `targets`."""
        rest = self._part(state, self.num_parts - 1)
        rest[:] = targets[-1][: len(rest)]

    def _part(self, state: Bytes, number: int) -> Bytes:
        return state[number * self._page_bytes : (number + 1) * self._page_bytes]

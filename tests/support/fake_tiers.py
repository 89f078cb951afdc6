"""Tiers below the fake runner's pages, as unkind as devices and disks may be: copies take their time, and disks lose
some of what they are given.
"""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from ostro.backends.fake import FakeRunner
from ostro.engine.costs import FetchCosts
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, Source, Spill, Store

Shared = dict[bytes, list[int]]
"""Pages that engines share, by digest."""


class _Offering(NamedTuple):
    offer: Offer
    pages: list[list[int]]
    """The pages' contents when the offer began."""

    @property
    def ticket(self) -> int:
        return self.offer.ticket


class FakePageStore:
    def __init__(
        self,
        runner: FakeRunner,
        *,
        num_slots: int,
        disk_pages: int = 0,
        loss: float = 0.0,
        seed: int = 0,
        shared: Shared | None = None,
    ) -> None:
        """`loss` is how likely a page on disk turns out to be damaged when it is read."""
        self._runner, self._disk_pages, self._loss = runner, disk_pages, loss
        self._shared = shared
        self._slots: list[list[int] | None] = [None] * num_slots
        self._disk: dict[bytes, list[int]] = {}
        self._under_way: list[Fetch | _Offering] = []
        self._random = Random(seed)
        self.stores: list[Store] = []
        self.num_damaged = 0
        self.num_asked = 0
        """How often `holds` was asked."""

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def has_disk(self) -> bool:
        return bool(self._disk_pages)

    @property
    def num_shared(self) -> int:
        return len(self._shared or ())

    @property
    def on_disk(self) -> int:
        return len(self._disk)

    def holds(self, digest: bytes) -> bool:
        self.num_asked += 1
        return digest in self._disk or self.is_shared(digest)

    @property
    def shares(self) -> bool:
        return self._shared is not None

    def is_shared(self, digest: bytes) -> bool:
        return self._shared is not None and digest in self._shared

    def look(self, done: Callable[[], None]) -> None:
        done()

    @property
    def under_way(self) -> Collection[int]:
        return [move.ticket for move in self._under_way]

    def carry_out(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Store(page, slot):
                    self.stores.append(move)
                    self._slots[slot] = self._runner.read_page(page)
                case Spill(digest, page, slot):
                    self._write(digest, self._runner.read_page(page) if page is not None else self._slot(slot))
                case Fetch():
                    for page in move.pages:
                        self._runner.write_page(page)
                    self._under_way.append(move)
                case Offer():
                    self._under_way.append(_Offering(move, [self._runner.read_page(page) for page in move.pages]))

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        """Some of what is under way arrives, and the first if the engine waits for it."""
        arrived = [move for move in self._under_way if self._random.random() < 0.4]
        if timeout and not arrived:
            arrived = self._under_way[:1]
        self._under_way = [move for move in self._under_way if move not in arrived]
        return [self._arrive(move) if isinstance(move, Fetch) else self._leave(move) for move in arrived]

    def close(self, hot: Sequence[Spill] = ()) -> None:
        self.carry_out(hot[::-1])
        if self._shared is not None:
            for digest, page, slot in hot:
                self._shared[digest] = self._runner.read_page(page) if page is not None else self._slot(slot)

    def inherit(self, closed: "FakePageStore") -> None:
        """Starts with the pages that a closed store left on disk."""
        self._disk = dict(closed._disk)

    def _arrive(self, move: Fetch) -> Arrival:
        for at, (source, page) in enumerate(zip(move.sources, move.pages, strict=True)):
            before = self.num_damaged
            slots = self._read(source)
            if slots is None:
                return Arrival(move.ticket, at, 0.0, num_damaged=self.num_damaged - before)
            self._runner.write_page(page, slots)
        return Arrival(move.ticket, len(move.pages), 0.0)

    def _leave(self, offering: _Offering) -> Arrival:
        """Completes an offer. A store may read a page until the offer ends, so it must not have changed by then."""
        offer, begun = offering
        assert [self._runner.read_page(page) for page in offer.pages] == begun, "a page changed while it was offered"
        num_good = self._random.randrange(len(begun)) if self._random.random() < self._loss else len(begun)
        assert self._shared is not None
        self._shared.update(zip(offer.digests[:num_good], begun[:num_good], strict=True))
        return Arrival(offer.ticket, num_good, 0.0)

    def _read(self, source: Source) -> list[int] | None:
        if isinstance(source, int):
            return self._slot(source)
        if self._random.random() < self._loss and self._disk.pop(source, None) is not None:
            self.num_damaged += 1
        return self._disk.get(source) or (self._shared or {}).get(source)

    def _write(self, digest: bytes, slots: list[int]) -> None:
        assert self._disk.pop(digest, slots) == slots, "a page on disk is not what it should be"
        self._disk[digest] = slots
        if len(self._disk) > self._disk_pages:
            del self._disk[next(iter(self._disk))]

    def _slot(self, slot: int | None) -> list[int]:
        assert slot is not None
        slots = self._slots[slot]
        assert slots is not None, f"slot {slot} is read before it is written"
        return slots


class FixedCosts(FetchCosts):
    """Fetches a fixed share of the prefixes that can be fetched, whatever the costs."""

    def __init__(self, share: float, seed: int = 0) -> None:
        super().__init__()
        self._share, self._random = share, Random(seed)

    def pays(self, pages: int, tokens: int, *, disk: bool, is_turn: bool = True) -> bool:
        return self._random.random() < self._share

"""Tiers below the fake runner's pages, as unkind as devices and disks may be: copies take their time, and disks lose
some of what they are given.
"""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from ostro.backends.fake import FakeRunner, FakeState
from ostro.engine.costs import FetchCosts
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, Spill, SpillState, Store, StoreState

Record = list[int] | FakeState
Shared = dict[bytes, Record]
"""Pages and states that engines share, by digest."""


class _Offering(NamedTuple):
    offer: Offer
    pages: list[list[int]]
    """The pages' contents when the offer began."""
    state: FakeState | None

    @property
    def ticket(self) -> int:
        return self.offer.ticket


class FakePageStore:
    def __init__(
        self,
        runner: FakeRunner,
        *,
        num_slots: int,
        num_state_slots: int = 0,
        disk_pages: int = 0,
        loss: float = 0.0,
        seed: int = 0,
        shared: Shared | None = None,
    ) -> None:
        """`loss` is how likely a record on disk turns out to be damaged when it is read."""
        self._runner, self._disk_pages, self._loss = runner, disk_pages, loss
        self._shared = shared
        self._slots: list[list[int] | None] = [None] * num_slots
        self._state_slots: list[FakeState | None] = [None] * num_state_slots
        self._disk: dict[bytes, Record] = {}
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
    def num_state_slots(self) -> int:
        return len(self._state_slots)

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

    def holds_state(self, digest: bytes) -> bool:
        return self.holds(digest)

    def is_state_shared(self, digest: bytes) -> bool:
        return self.is_shared(digest)

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
                case Spill():
                    self._write(move.digest, self._page_of(move))
                case Fetch():
                    for page in move.pages:
                        self._runner.write_page(page)
                    if move.state is not None:
                        self._runner.write_state(move.state.state)
                    self._under_way.append(move)
                case Offer():
                    state = None if move.state is None else self._runner.read_state(move.state.state)
                    pages = [self._runner.read_page(page) for page in move.pages]
                    self._under_way.append(_Offering(move, pages, state))
                case StoreState(state=at, slot=slot):
                    self._state_slots[slot] = self._runner.read_state(at)
                case SpillState():
                    self._write(move.digest, self._state_of(move))

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        """Some of what is under way arrives, and the first if the engine waits for it."""
        arrived = [move for move in self._under_way if self._random.random() < 0.4]
        if timeout and not arrived:
            arrived = self._under_way[:1]
        self._under_way = [move for move in self._under_way if move not in arrived]
        return [self._arrive(move) if isinstance(move, Fetch) else self._leave(move) for move in arrived]

    def close(self, hot: Sequence[Spill | SpillState] = ()) -> None:
        self.carry_out(hot[::-1])
        if self._shared is not None:
            for move in hot:
                self._shared[move.digest] = self._page_of(move) if isinstance(move, Spill) else self._state_of(move)

    def inherit(self, closed: "FakePageStore") -> None:
        """Starts with the pages that a closed store left on disk."""
        self._disk = dict(closed._disk)

    def _arrive(self, move: Fetch) -> Arrival:
        for at, (source, page) in enumerate(zip(move.sources, move.pages, strict=True)):
            before = self.num_damaged
            slots = self._slot(source) if isinstance(source, int) else self._read(source)
            if slots is None:
                return Arrival(move.ticket, at, 0.0, num_damaged=self.num_damaged - before)
            assert isinstance(slots, list), "a page's digest is that of a state"
            self._runner.write_page(page, slots)
        state, before = None, self.num_damaged
        if move.state is not None:
            source, target = move.state
            state = self._state_slots[source] if isinstance(source, int) else self._read(source)
            assert state is None or isinstance(state, FakeState), "a state's digest is that of a page"
            self._runner.write_state(target, state)
        damaged = self.num_damaged - before
        return Arrival(move.ticket, len(move.pages), 0.0, num_damaged=damaged, has_state=state is not None)

    def _leave(self, offering: _Offering) -> Arrival:
        """Completes an offer. A store may read a page until the offer ends, so it must not have changed by then."""
        offer, begun, state = offering
        assert [self._runner.read_page(page) for page in offer.pages] == begun, "a page changed while it was offered"
        is_cut = bool(begun) and self._random.random() < self._loss
        num_good = self._random.randrange(len(begun)) if is_cut else len(begun)
        assert self._shared is not None
        self._shared.update(zip(offer.digests[:num_good], begun[:num_good], strict=True))
        has_state = state is not None and num_good == len(begun) and self._random.random() >= self._loss
        if state is not None and offer.state is not None and has_state:
            self._shared[offer.state.digest] = state
        return Arrival(offer.ticket, num_good, 0.0, has_state=has_state)

    def _page_of(self, move: Spill) -> list[int]:
        return self._runner.read_page(move.page) if move.page is not None else self._slot(move.slot)

    def _state_of(self, move: SpillState) -> FakeState:
        state = self._runner.read_state(move.state) if move.state is not None else self._state_slots[move.slot or 0]
        assert state is not None, "a state's slot is read before it is written"
        return state

    def _read(self, source: bytes) -> Record | None:
        if self._random.random() < self._loss and self._disk.pop(source, None) is not None:
            self.num_damaged += 1
        return self._disk.get(source) or (self._shared or {}).get(source)

    def _write(self, digest: bytes, record: Record) -> None:
        assert self._disk.pop(digest, record) == record, "a record on disk is not what it should be"
        self._disk[digest] = record
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

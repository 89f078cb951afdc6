"""Memory below the device's pages, as the engine knows it: slots and digests in, arrivals out. Knows no tree.

Where models keep recurrent states, a state is a record of a second kind: it has slots of its own in host memory, and a
digest of its own on disk.

The engine decides what is copied where, and a runner's PageStore copies. It keeps the order of the moves and of the
steps around them, so that each copy has the contents that the engine means:

    step 1 writes page 7 ── Store(page 7, slot 3) ── step 2 overwrites page 7      the slot has what step 1 wrote
    Fetch(slot 3 -> page 9) ── arrives ── step 5 reads page 9                      no step before it uses page 9
    step 1 writes page 7 ── Offer(page 7) ── arrives ── step 5 overwrites page 7   nobody writes to it meanwhile
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Source = int | bytes
"""A slot, or the digest of a page or a state on disk."""


class Store(NamedTuple):
    """Copies a page to a slot."""

    page: int
    slot: int


class Spill(NamedTuple):
    """Writes a page to disk under its digest: from a slot or from the device. It may be dropped."""

    digest: bytes
    page: int | None = None
    slot: int | None = None


class StoreState(NamedTuple):
    """Copies a state to a slot for states."""

    state: int
    slot: int


class SpillState(NamedTuple):
    """Writes a state to disk under its digest: from a slot for states or from the device. It may be dropped."""

    digest: bytes
    state: int | None = None
    slot: int | None = None


class StateCopy(NamedTuple):
    """The last part of a fetch: a state, and the device's slot that it is copied to."""

    source: Source
    state: int


class Fetch(NamedTuple):
    """Copies from slots and from disk into pages and then a state's slot, which nobody else uses until the arrival is
    reported.
    """

    ticket: int
    sources: tuple[Source, ...]
    pages: tuple[int, ...]
    state: StateCopy | None = None


class StateOffer(NamedTuple):
    """The last part of an offer: a state on the device. It is copied when the offer begins."""

    digest: bytes
    state: int


class Offer(NamedTuple):
    """Shares pages with other engines, and then a state. Nobody writes to the pages until the arrival is reported."""

    ticket: int
    digests: tuple[bytes, ...]
    pages: tuple[int, ...]
    state: StateOffer | None = None


Move = Store | StoreState | Spill | SpillState | Fetch | Offer


@dataclass(frozen=True, slots=True)
class Arrival:
    """A fetch or an offer that has ended."""

    ticket: int
    num_good: int
    """Leading pages that were copied. The others are no longer in the lower tier (a fetch), or were not shared (an
    offer)."""
    seconds: float
    """How long the copies took, without the time in the queue."""
    disk_seconds: float = 0.0
    """The part of `seconds` spent on pages from disk."""
    num_damaged: int = 0
    """Pages and states that were on disk but turned out to be damaged."""
    has_state: bool = False
    """Whether all pages were copied, and the state behind them too."""


class PageStore(Protocol):
    @property
    def num_slots(self) -> int:
        """Slots in host memory; 0 if there is nothing between pages and disk."""

    @property
    def num_state_slots(self) -> int:
        """The same for recurrent states."""

    @property
    def has_disk(self) -> bool:
        """Whether it keeps pages on disk. If not, none are spilled."""

    @property
    def on_disk(self) -> int:
        """Pages on its own disk."""

    @property
    def num_shared(self) -> int:
        """Pages that other engines find as well."""

    def holds(self, digest: bytes) -> bool:
        """Whether a page is on disk or shared, as far as is known."""

    def holds_state(self, digest: bytes) -> bool:
        """The same for a recurrent state."""

    @property
    def shares(self) -> bool:
        """Whether pages can be shared with other engines. If not, none are offered."""

    def is_shared(self, digest: bytes) -> bool:
        """Whether other engines find a page, as far as is known."""

    def is_state_shared(self, digest: bytes) -> bool:
        """The same for a recurrent state."""

    def look(self, done: Callable[[], None]) -> None:
        """Finds out what other engines have shared by now, and then calls `done`, perhaps in another thread."""

    @property
    def under_way(self) -> Collection[int]:
        """Tickets of fetches and offers that have begun and that `arrivals` has not returned. Accurate even after a
        failed move: no other fetch or offer reads or writes a page.
        """

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Begins the moves, in order: after the steps launched so far, and before any that is launched later."""

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        """Fetches and offers that have ended since the last call; waits for up to `timeout` seconds if none has."""

    def close(self, hot: Sequence[Spill | SpillState] = ()) -> None:
        """If the disk outlives the engine, writes those of these records that it does not hold, the most recently used
        first, and keeps the others there. Shares them with other engines, if it can. Waits for all that is being
        written. Nothing may be moved afterwards.
        """


class Stateless:
    """The part of a PageStore that keeps no recurrent states."""

    num_state_slots = 0

    def holds_state(self, digest: bytes) -> bool:
        return False

    def is_state_shared(self, digest: bytes) -> bool:
        return False


class Unshared(Stateless):
    """The part of a PageStore that knows no other engines, and no states."""

    shares = False
    num_shared = 0

    def is_shared(self, digest: bytes) -> bool:
        return False

    def look(self, done: Callable[[], None]) -> None:
        done()

"""The disk tier below pages that are already in host memory: pages are written from and read to where they are, and so
are recurrent states. Small trial stores on temporary files measure how long copies take. Knows no engine beyond its
port.
"""

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from ostro.backends.tiers.page_disk import Ended, PageDisk
from ostro.backends.tiers.page_file import Bytes, PageFileUnusable, file_bytes, open_page_file
from ostro.backends.tiers.state_records import HostStates, StateRecords
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, PageStore, Spill, SpillState, Store, StoreState


class HostPages(Protocol):
    def page(self, number: int) -> Bytes:
        """A view of a page's memory."""


class OverDisk:
    """The part of a PageStore that asks a disk."""

    def __init__(self, disk: PageDisk, *, outlives: bool) -> None:
        """`outlives` says whether the disk's pages are kept for the next engine."""
        self._disk, self._outlives = disk, outlives

    @property
    def has_disk(self) -> bool:
        return bool(self._disk.num_records)

    @property
    def on_disk(self) -> int:
        return len(self._disk)

    @property
    def num_shared(self) -> int:
        return self._disk.num_shared

    def holds(self, digest: bytes) -> bool:
        return self._disk.holds(digest)

    @property
    def shares(self) -> bool:
        return self._disk.shares

    def is_shared(self, digest: bytes) -> bool:
        return self._disk.is_shared(digest)

    def look(self, done: Callable[[], None]) -> None:
        self._disk.look(done)


class _Arriving(NamedTuple):
    """A state that is being read behind so many pages."""

    num_pages: int
    state: Bytes
    targets: Sequence[Bytes]


class DiskStore(OverDisk):
    num_slots = num_state_slots = 0

    def __init__(self, pages: HostPages, disk: PageDisk, *, outlives: bool, states: HostStates | None = None) -> None:
        super().__init__(disk, outlives=outlives)
        self._pages, self._states = pages, states
        self._records = None if states is None else StateRecords(states.state_bytes, disk.page_bytes)
        # By ticket.
        self._arriving: dict[int, _Arriving] = {}
        self._offered: dict[int, int] = {}
        """How many pages each offer has before its state."""

    def holds_state(self, digest: bytes) -> bool:
        return self._records is not None and self._disk.holds_all(self._records.digests(digest))

    def is_state_shared(self, digest: bytes) -> bool:
        return self._records is not None and all(map(self._disk.is_shared, self._records.digests(digest)))

    @property
    def under_way(self) -> Collection[int]:
        return self._disk.under_way

    def carry_out(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Spill():
                    self._disk.write(move.digest, self._copy_of(move))
                case SpillState():
                    self._disk.write_together([(digest, part()) for digest, part in self._parts_of(move)])
                case Fetch():
                    self._fetch(move)
                case Offer():
                    self._offer(move)
                case Store() | StoreState():
                    raise AssertionError("there are no slots")

    def _fetch(self, move: Fetch) -> None:
        digests = [source for source in move.sources if isinstance(source, bytes)]
        targets = [self._pages.page(page) for page in move.pages]
        if move.state is not None and isinstance(move.state.source, bytes):
            states, records = self._with_states()
            states.note_overwritten(move.state.state)
            state = states.state(move.state.state)
            arriving = _Arriving(len(targets), state, records.targets(state))
            self._arriving[move.ticket] = arriving
            digests += records.digests(move.state.source)
            targets += arriving.targets
        self._disk.read(move.ticket, digests, targets)

    def _offer(self, move: Offer) -> None:
        # Pages are not copied, because nobody writes to them.
        offered = [(digest, self._pages.page(page)) for digest, page in zip(move.digests, move.pages, strict=True)]
        if move.state is not None:
            states, records = self._with_states()
            digests, parts = records.digests(move.state.digest), records.copies(states.state(move.state.state))
            self._offered[move.ticket] = len(offered)
            offered += zip(digests, parts, strict=True)
        self._disk.offer(move.ticket, offered)

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        return [self._arrival(each) for each in self._disk.ended(timeout)]

    def _arrival(self, ended: Ended) -> Arrival:
        num_good, seconds = ended.num_good, ended.seconds
        arriving, num_pages = self._arriving.pop(ended.ticket, None), self._offered.pop(ended.ticket, None)
        if arriving is not None:
            num_pages = arriving.num_pages
        has_state = num_pages is not None and num_good == num_pages + self._with_states()[1].num_parts
        if arriving is not None and has_state:
            self._with_states()[1].complete(arriving.state, arriving.targets)
        num_good = num_good if num_pages is None else min(num_good, num_pages)
        return Arrival(ended.ticket, num_good, seconds, seconds, len(ended.lost), has_state)

    def close(self, hot: Sequence[Spill | SpillState] = ()) -> None:
        records: list[tuple[bytes, Callable[[], Bytes]]] = []
        for move in hot:
            if isinstance(move, Spill):
                records.append((move.digest, self._copy_of(move)))
            else:
                records += self._parts_of(move)
        self._disk.close(records, outlives=self._outlives)

    def _parts_of(self, move: SpillState) -> list[tuple[bytes, Callable[[], Bytes]]]:
        assert move.state is not None, "there are no slots"
        states, records = self._with_states()
        state = states.state(move.state)
        return [(digest, partial(records.part, state, at)) for at, digest in enumerate(records.digests(move.digest))]

    def _with_states(self) -> tuple[HostStates, StateRecords]:
        assert self._states is not None, "the model keeps no states"
        assert self._records is not None
        return self._states, self._records

    def _copy_of(self, move: Spill) -> Callable[[], Bytes]:
        assert move.page is not None, "there are no slots"
        return partial(_copied, self._pages, move.page)


def _copied(pages: HostPages, number: int) -> Bytes:
    return pages.page(number).copy()


TRIAL_PAGES = 64

_log = logging.getLogger(__name__)


class TrialStores(NamedTuple):
    """Each tier that a runner can have, small and on its own, to time its copies."""

    page_bytes: int
    host: PageStore | None
    staged: int
    """Pages that can be on their way to host memory."""
    disk: PageStore | None
    waiting: int
    """Pages that can wait to be written."""


@contextmanager
def trial_disk(pages: HostPages, page_bytes: int) -> Iterator[tuple[DiskStore, PageDisk] | tuple[None, None]]:
    limit = file_bytes(TRIAL_PAGES, page_bytes)
    try:
        directory = Path(tempfile.gettempdir())
        file = open_page_file(directory, None, identity=bytes(32), page_bytes=page_bytes, limit=limit)
    except (PageFileUnusable, OSError) as error:
        _log.warning("the disk is not measured: %s. Set TMPDIR to a directory that can be written.", error)
        yield None, None
        return
    disk = PageDisk(file)
    with closing(DiskStore(pages, disk, outlives=False)) as store:
        yield store, disk

"""The disk tier below pages that are already in host memory: pages are written from and read to where they are. Small
trial stores on temporary files measure how long copies take. Knows no engine beyond its port.
"""

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import Bytes, PageFileUnusable, file_bytes, open_page_file
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, PageStore, Spill, Store


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


class DiskStore(OverDisk):
    num_slots = 0

    def __init__(self, pages: HostPages, disk: PageDisk, *, outlives: bool) -> None:
        super().__init__(disk, outlives=outlives)
        self._pages = pages

    @property
    def under_way(self) -> Collection[int]:
        return self._disk.under_way

    def carry_out(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Spill():
                    self._disk.write(move.digest, self._copy_of(move))
                case Fetch(ticket=ticket, sources=sources, pages=pages):
                    digests = [source for source in sources if isinstance(source, bytes)]
                    self._disk.read(ticket, digests, [self._pages.page(page) for page in pages])
                case Offer(ticket=ticket, digests=offered, pages=pages):
                    # Not copied, because nobody writes to them.
                    views = [self._pages.page(page) for page in pages]
                    self._disk.offer(ticket, list(zip(offered, views, strict=True)))
                case Store():
                    raise AssertionError("there are no slots")

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        ended = self._disk.ended(timeout)
        return [Arrival(each.ticket, each.num_good, each.seconds, each.seconds, len(each.lost)) for each in ended]

    def close(self, hot: Sequence[Spill] = ()) -> None:
        self._disk.close([(move.digest, self._copy_of(move)) for move in hot], outlives=self._outlives)

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

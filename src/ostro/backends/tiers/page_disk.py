"""Pages on disk by their digests: an index, and a thread that reads and writes them. Knows no engine.

Some are in this engine's own file, others in bundles that engines share; either may be missing.

Jobs are done in the order in which they were given, so that a page that is still being written can already be read.
The index belongs to the caller's thread; the other thread reports through `ended`.
"""

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ostro.backends.tiers.page_bundles import PageBundles
from ostro.backends.tiers.page_file import Bytes, PageFile

# Pages waiting to be written take at most this much memory, but at least a few may wait; further ones are dropped.
_MOST_WAITING = 256 << 20
_FEWEST_WAITING = 8
# How often to look for new bundles.
_LOOK_SECONDS = 0.5
# Pages shared when an engine ends go into bundles of this size, so that little is lost if it is killed meanwhile.
_BUNDLE_BYTES = 64 << 20
# The thread's niceness: it gets a tenth of a core where steps want all of it.
_NICE = 10

_log = logging.getLogger(__name__)


class _Write(NamedTuple):
    record: int
    digest: bytes
    order: int
    page: Bytes
    done: Callable[[], None]


class _Read(NamedTuple):
    ticket: int
    wanted: tuple[tuple[int | None, bytes, Bytes], ...]
    """Each page's record, or None if it is in a bundle; its digest; and where it goes."""


class _Offer(NamedTuple):
    ticket: int | None
    """None if nobody waits for it."""
    pages: tuple[tuple[bytes, Bytes], ...]
    done: Callable[[], None]


class _Look(NamedTuple):
    """A thorough look: the caller knows that there is something new."""

    done: Callable[[], None]


_Job = _Write | _Read | _Offer | _Look


class Ended(NamedTuple):
    """A finished read, with its leading intact pages; or a finished offer, with the pages written."""

    ticket: int
    num_good: int
    lost: tuple[bytes, ...]
    """The digest of the first page that was not intact, if any."""
    seconds: float


class PageDisk:
    def __init__(self, file: PageFile | None, bundles: PageBundles | None = None) -> None:
        """At least one of both must be given."""
        pages = bundles if file is None else file
        assert pages is not None, "there is nowhere to keep a page"
        self._file, self._bundles, self.page_bytes = file, bundles, pages.page_bytes
        self.num_records = 0 if file is None else file.num_records
        found = [] if file is None else sorted(file.found())
        # Least recently used first. Of a page that was written twice, the later record counts.
        self._index: OrderedDict[bytes, int] = OrderedDict((each.digest, each.record) for each in found)
        used = set(self._index.values())
        self._free = [record for record in reversed(range(self.num_records)) if record not in used]
        self._order = found[-1].order + 1 if found else 0
        self.most_waiting = max(_FEWEST_WAITING, _MOST_WAITING // self.page_bytes)
        """Pages that can wait to be written."""
        self._room = threading.Semaphore(self.most_waiting)
        self._is_failing = self._is_blind = False
        self._look_at = 0.0
        self.under_way: set[int] = set()
        """Tickets of reads and offers that `ended` has not returned."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pages", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Number of pages in its own file."""
        return len(self._index)

    @property
    def num_shared(self) -> int:
        """Pages in bundles."""
        return 0 if self._bundles is None else len(self._bundles)

    @property
    def shares(self) -> bool:
        """Whether it shares pages in bundles."""
        return self._bundles is not None

    def holds(self, digest: bytes) -> bool:
        return digest in self._index or self.is_shared(digest)

    def holds_all(self, digests: Iterable[bytes]) -> bool:
        return all(self.holds(digest) for digest in digests)

    def is_shared(self, digest: bytes) -> bool:
        """Whether other engines can find the page."""
        return self._bundles is not None and self._bundles.holds(digest)

    def write(self, digest: bytes, page: Callable[[], Bytes], done: Callable[[], None] = lambda: None) -> None:
        """Writes the result of `page` in the background, or drops the page if too many already wait. Calls `done`,
        perhaps in another thread, once the bytes are no longer needed.
        """
        if self.num_records and not self._is_failing and self._room.acquire(blocking=False):
            self._begin(digest, page(), self._order, done)
        else:
            done()

    def write_together(self, pages: Sequence[tuple[bytes, Bytes]]) -> None:
        """The same for records that are of use together only: writes all of them or none."""
        if self._is_failing or len(pages) > self.num_records:
            return
        for taken in range(len(pages)):
            if not self._room.acquire(blocking=False):
                if taken:
                    self._room.release(taken)
                return
        for digest, page in pages:
            self._begin(digest, page, self._order)

    def write_all(self, pages: Sequence[tuple[bytes, Callable[[], Bytes]]]) -> None:
        """Writes the pages that are not there yet, most recently used first; waits where `write` would drop a page.
        Older pages make room for them.
        """
        pages = pages[: self.num_records]
        for digest, _ in reversed(pages):
            if digest in self._index:
                self._index.move_to_end(digest)
        newest, self._order = self._order + len(pages), self._order + len(pages)
        for at, (digest, page) in enumerate(pages):
            if self._is_failing:
                break
            if digest in self._index:
                continue
            self._room.acquire()
            self._begin(digest, page(), newest - at)

    def _begin(self, digest: bytes, page: Bytes, order: int, done: Callable[[], None] = lambda: None) -> None:
        if (record := self._index.pop(digest, None)) is None:
            record = self._free.pop() if self._free else self._index.popitem(last=False)[1]
        self._index[digest] = record
        self._order = max(self._order, order + 1)
        self._jobs.put(_Write(record, digest, order, page, done))

    def read(self, ticket: int, digests: Sequence[bytes], into: Sequence[Bytes]) -> None:
        """Begins to read pages; `ended` reports when they have arrived."""
        records: list[int | None] = []
        for digest in digests:
            if (record := self._index.get(digest)) is not None:
                self._index.move_to_end(digest)
            elif not self.is_shared(digest):
                break
            records.append(record)
        # Recorded before the read begins: an interrupt in between must not free the memory that it reads to.
        self.under_way.add(ticket)
        self._jobs.put(_Read(ticket, tuple(zip(records, digests, into, strict=False))))

    def offer(self, ticket: int, pages: Sequence[tuple[bytes, Bytes]], done: Callable[[], None] = lambda: None) -> None:
        """Begins to share pages; `ended` reports how many were shared. Calls `done`, in another thread, once the bytes
        are no longer needed.
        """
        self.under_way.add(ticket)
        self._jobs.put(_Offer(ticket, tuple(pages), done))

    def offer_all(self, pages: Sequence[tuple[bytes, Callable[[], Bytes]]]) -> None:
        """Shares the pages that are not shared yet, in bundles, in order."""
        each = max(1, min(self.most_waiting, _BUNDLE_BYTES // self.page_bytes))
        fresh = [(digest, page) for digest, page in pages if not self.is_shared(digest)]
        for at in range(0, len(fresh), each):
            some = fresh[at : at + each]
            for _ in some:
                self._room.acquire()
            bundle = tuple((digest, page()) for digest, page in some)
            self._jobs.put(_Offer(None, bundle, partial(self._room.release, len(some))))

    def look(self, done: Callable[[], None]) -> None:
        """Looks for new bundles, and then calls `done`, in another thread."""
        self._jobs.put(_Look(done))

    def ended(self, timeout: float = 0.0) -> list[Ended]:
        """The reads and offers that have ended since the last call; waits for the first for up to `timeout` seconds."""
        ended: list[Ended] = []
        try:
            ended.append(self._ended.get(timeout=timeout) if timeout else self._ended.get_nowait())
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            pass
        self.under_way.difference_update(each.ticket for each in ended)
        for digest in (digest for each in ended for digest in each.lost):
            if (record := self._index.pop(digest, None)) is not None:
                self._free.append(record)
        return ended

    def close(self, hot: Sequence[tuple[bytes, Callable[[], Bytes]]] = (), *, outlives: bool = False) -> None:
        """Shares the hot pages, and keeps them if the file outlives this process. Waits until everything is written."""
        if outlives:
            self.write_all(hot)
        if self.shares:
            self.offer_all(hot)
        self._jobs.put(None)
        self._thread.join()
        if self._file is not None:
            self._file.close()
        if self._bundles is not None:
            self._bundles.close()

    def _work(self) -> None:
        if sys.platform == "linux":
            # Lowers this thread's priority only: steps compute on all cores, and pages should not slow them down.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._next_job()) is not None:
            match job:
                case _Read():
                    self._ended.put(self._read(job))
                case _Write():
                    self._write(job)
                    job.done()
                    self._room.release()
                case _Offer():
                    self._offer(job)
                case _Look():
                    self._look(thoroughly=True)
                    job.done()

    def _next_job(self) -> _Job | None:
        """The next job. While it waits, looks for new bundles from time to time."""
        if self._bundles is None:
            return self._jobs.get()
        while True:
            try:
                job = self._jobs.get(timeout=max(0.001, self._look_at - time.monotonic()))
            except Empty:
                self._look()
                continue
            if time.monotonic() > self._look_at:
                self._look()
            return job

    def _look(self, *, thoroughly: bool = False) -> None:
        if self._bundles is None:
            return
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            self._bundles.look(thoroughly=thoroughly)
        except Exception as error:  # noqa: BLE001  without this thread, every read would wait for ever
            if not self._is_blind:
                _log.warning("prefixes of other engines are not found: %s", error)
            self._is_blind = True
        else:
            self._is_blind = False

    def _offer(self, job: _Offer) -> None:
        began, num_written = time.perf_counter(), 0
        try:
            if self._bundles is not None:
                num_written = self._bundles.write(job.pages)
        except Exception:  # noqa: BLE001  whatever it is, somebody waits for the answer
            _log.exception("pages could not be shared")
        job.done()
        if job.ticket is not None:
            self._ended.put(Ended(job.ticket, num_written, (), time.perf_counter() - began))

    def _read(self, job: _Read) -> Ended:
        began = time.perf_counter()
        for at, (record, digest, into) in enumerate(job.wanted):
            if not self._is_right(record, digest, into):
                # A bundle may have been deleted to make room, which is not damage.
                lost = () if record is None else (digest,)
                return Ended(job.ticket, at, lost, time.perf_counter() - began)
        return Ended(job.ticket, len(job.wanted), (), time.perf_counter() - began)

    def _is_right(self, record: int | None, digest: bytes, into: Bytes) -> bool:
        try:
            if record is None:
                return self._bundles is not None and self._bundles.read(digest, into.data)
            return self._file is not None and self._file.read(record, digest, into.data)
        except Exception:  # noqa: BLE001  whatever it is, a request waits for the answer
            _log.exception("a page on disk could not be read, and is computed again")
            return False

    def _write(self, job: _Write) -> None:
        if self._is_failing or self._file is None:
            return
        try:
            self._file.write(job.record, job.digest, job.order, job.page.data)
        except OSError as error:
            # The file can still be read. Reading finds out which pages of the index are not in it.
            self._is_failing = True
            _log.warning("no more pages are written to disk: %s. Free some space, and restart.", error)
        except Exception:  # noqa: BLE001  without this thread, every read would wait for ever
            self._is_failing = True
            _log.exception("no more pages are written to disk")

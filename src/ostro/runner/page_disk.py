"""Pages on disk by their digests: which there are, and a thread that reads and writes them. Knows no engine.

Jobs are done in the order in which they were given, so that a page that is still being written can already be read.
The index belongs to the caller's thread: what the other finds out, it tells in `ended`.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.runner.page_file import PageFile

Bytes = npt.NDArray[np.uint8]

# Pages that wait to be written take up to so much memory, but at least a few; others are dropped then.
_MOST_WAITING = 256 << 20
_FEWEST_WAITING = 8

_log = logging.getLogger(__name__)


class _Write(NamedTuple):
    record: int
    digest: bytes
    order: int
    page: Bytes
    done: Callable[[], None]


class _Read(NamedTuple):
    ticket: int
    wanted: tuple[tuple[int, bytes, Bytes], ...]
    """Each page's record, its digest, and where it goes."""


class Ended(NamedTuple):
    """A read that has ended, with the pages that are right, from the first on."""

    ticket: int
    num_good: int
    lost: tuple[bytes, ...]
    """The digest of the first that was not, if any."""
    seconds: float


class PageDisk:
    def __init__(self, file: PageFile) -> None:
        self._file = file
        found = sorted(file.found())
        # Least recently used first. Of a page that was written twice, the later record counts.
        self._index: OrderedDict[bytes, int] = OrderedDict((each.digest, each.record) for each in found)
        used = set(self._index.values())
        self._free = [record for record in reversed(range(file.num_records)) if record not in used]
        self._order = found[-1].order + 1 if found else 0
        self._room = threading.Semaphore(max(_FEWEST_WAITING, _MOST_WAITING // file.page_bytes))
        self._is_failing = False
        self.under_way: set[int] = set()
        """Tickets of reads that `ended` has not returned."""
        self._jobs: SimpleQueue[_Write | _Read | None] = SimpleQueue()
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pages", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_records(self) -> int:
        return self._file.num_records

    @property
    def page_bytes(self) -> int:
        return self._file.page_bytes

    def holds(self, digest: bytes) -> bool:
        return digest in self._index

    def write(self, digest: bytes, page: Callable[[], Bytes], done: Callable[[], None] = lambda: None) -> None:
        """Has what `page` returns written, unless too many wait for that already: then the page is not kept. Calls
        `done`, perhaps in another thread, when the bytes are not needed any more.
        """
        if self.num_records and not self._is_failing and self._room.acquire(blocking=False):
            self._begin(digest, page(), self._order, done)
        else:
            done()

    def write_all(self, pages: Sequence[tuple[bytes, Callable[[], Bytes]]]) -> None:
        """Has those pages written that are not there yet, the most recently used first, and waits where `write` would
        give up. Others make room for them.
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
        """Begins to read pages; `ended` tells when they are there."""
        records = []
        for digest in digests:
            if (record := self._index.get(digest)) is None:
                break
            self._index.move_to_end(digest)
            records.append(record)
        # Before it begins: an interrupt in between must not free the memory that it reads to.
        self.under_way.add(ticket)
        self._jobs.put(_Read(ticket, tuple(zip(records, digests, into, strict=False))))

    def ended(self, timeout: float = 0.0) -> list[Ended]:
        """The reads that have ended since the last call; waits for the first of them for up to `timeout` seconds."""
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

    def close(self) -> None:
        """Waits until all is written."""
        self._jobs.put(None)
        self._thread.join()
        self._file.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Read):
                self._ended.put(self._read(job))
            else:
                self._write(job)
                job.done()
                self._room.release()

    def _read(self, job: _Read) -> Ended:
        began = time.perf_counter()
        for at, (record, digest, into) in enumerate(job.wanted):
            if not self._is_right(record, digest, into):
                return Ended(job.ticket, at, (digest,), time.perf_counter() - began)
        return Ended(job.ticket, len(job.wanted), (), time.perf_counter() - began)

    def _is_right(self, record: int, digest: bytes, into: Bytes) -> bool:
        try:
            return self._file.read(record, digest, into.data)
        except Exception:  # noqa: BLE001  whatever it is, a request waits for the answer
            _log.exception("a page on disk could not be read, and is computed again")
            return False

    def _write(self, job: _Write) -> None:
        if self._is_failing:
            return
        try:
            self._file.write(job.record, job.digest, job.order, job.page.data)
        except OSError as error:
            # What is in the file can still be read. What the index has and the file has not is found out when read.
            self._is_failing = True
            _log.warning("no more pages are written to disk: %s. Free some space, and restart.", error)
        except Exception:  # noqa: BLE001  without this thread, every read would wait for ever
            self._is_failing = True
            _log.exception("no more pages are written to disk")

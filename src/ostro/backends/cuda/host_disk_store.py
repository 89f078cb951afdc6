"""Disk below a GPU's pages, through host memory. Knows no CUDA: `HostStore` copies, and a thread of `PageDisk` writes.

The engine's slots move between places in memory. A slot that is spilled hands its memory to the disk, and takes a spare
one:

    slots     0 1 2 3 4 │ spare: on their way to disk, or none's │ incoming: on their way from disk
    memory    4 1 7 0 2 │ 3 5 6                                  │ 8 9

If no memory is spare, the disk is slower than the device, and the page is not kept. Pages from disk come through the
incoming memory, one fetch at a time, as many as fit there at once. Pages that are offered to other engines leave
through spare memory, one offer at a time, as many as there is memory for.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from ostro.backends.cuda.host_store import HostStore
from ostro.backends.tiers.disk_store import OverDisk
from ostro.backends.tiers.page_disk import Ended, PageDisk
from ostro.backends.tiers.page_file import Bytes
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, Spill, SpillState, Stateless, Store

# How often to ask whether pages that are offered have arrived in host memory.
_POLL_SECONDS = 0.002


@dataclass
class _Job:
    """A fetch, part by part."""

    fetch: Fetch
    num_good: int = 0
    num_read: int = 0
    """Pages that are being read from disk."""
    seconds: float = 0.0
    disk_seconds: float = 0.0
    num_damaged: int = 0


@dataclass
class _Offering:
    """An offer, part by part."""

    offer: Offer
    num_good: int = 0
    memory: tuple[int, ...] = ()
    """Where in memory the part in transit is."""
    stored: Callable[[], bool] | None = None
    """Whether it has arrived there; None once the disk is writing it."""
    seconds: float = 0.0


class HostDiskStore(Stateless, OverDisk):
    def __init__(self, host: HostStore, disk: PageDisk, *, num_slots: int, num_incoming: int, outlives: bool) -> None:
        """The engine gets `num_slots` of the host's slots; the others are spare, or for pages from disk."""
        assert 0 < num_incoming < host.num_slots - num_slots
        super().__init__(disk, outlives=outlives)
        self.num_slots = num_slots
        self._host = host
        self._memory = list(range(num_slots))
        """The place in host memory of each slot."""
        first_incoming = host.num_slots - num_incoming
        self._incoming = range(first_incoming, host.num_slots)
        # Filled by the disk's thread as well.
        self._spare: deque[int] = deque(range(num_slots, first_incoming))
        # Pages that are still on their way to host memory, and then go to disk: when, what, and where they are.
        self._leaving: deque[tuple[Callable[[], bool], bytes, int]] = deque()
        self._on_host: dict[int, _Job] = {}
        """By ticket, the job whose part the host is fetching."""
        self._waiting: deque[_Job] = deque()
        """Jobs whose next part is on disk. The first is under way."""
        self._offers: deque[_Offering] = deque()
        """Offers, of which the first is under way once there is spare memory for it."""
        self._arrived: list[Arrival] = []

    @property
    def under_way(self) -> Collection[int]:
        waiting = {job.fetch.ticket for job in self._waiting} | {each.offer.ticket for each in self._offers}
        return waiting | set(self._host.under_way) | {each.ticket for each in self._arrived}

    def carry_out(self, moves: Sequence[Move]) -> None:
        on_host: list[Move] = []
        leaving: list[tuple[bytes, int]] = []
        for move in moves:
            match move:
                case Store(page, slot):
                    on_host.append(Store(page, self._memory[slot]))
                case Spill(digest, page, slot) if self._spare:
                    memory = self._spare.popleft()
                    if slot is not None:
                        memory, self._memory[slot] = self._memory[slot], memory
                    elif page is not None:
                        on_host.append(Store(page, memory))
                    leaving.append((digest, memory))
                case Fetch():
                    on_host += self._begin(_Job(move))
                case Offer():
                    self._offers.append(_Offering(move))
        self._host.carry_out(on_host)
        if leaving:
            stored = self._host.stored()
            self._leaving += [(stored, digest, memory) for digest, memory in leaving]
        self._write_stored()

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        self._write_stored()
        self._offer_next()
        is_offering = bool(self._offers)
        reading = (bool(self._waiting) or is_offering) and not self._on_host
        # Offered pages may still be on their way to host memory, and nothing reports their arrival.
        wait = min(timeout, _POLL_SECONDS) if is_offering else timeout
        offered = self._offers[0].offer.ticket if is_offering else None
        for ended in self._disk.ended(wait if reading else 0.0):
            if ended.ticket == offered:
                self._take_offered(ended)
            else:
                self._take_read(ended)
        for arrival in self._host.arrivals(0.0 if reading else timeout):
            self._take_part(self._on_host.pop(arrival.ticket), arrival)
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, hot: Sequence[Spill | SpillState] = ()) -> None:
        self._host.close()
        self._write_stored()
        pages = [(move.digest, partial(self._bytes_of, move)) for move in hot if isinstance(move, Spill)]
        self._disk.close(pages, outlives=self._outlives)

    # ---- down

    def _write_stored(self) -> None:
        """Hands pages that have arrived in host memory to the disk."""
        while self._leaving and self._leaving[0][0]():
            _, digest, memory = self._leaving.popleft()
            self._disk.write(digest, partial(self._host.slot, memory), partial(self._spare.append, memory))

    def _bytes_of(self, move: Spill) -> Bytes:
        if move.slot is not None:
            return self._host.slot(self._memory[move.slot])
        assert move.page is not None
        return self._host.page(move.page)

    def _offer_next(self) -> None:
        """Continues the first offer: takes spare memory for its next part, or hands that to the disk once it has
        arrived.
        """
        if not self._offers:
            return
        job = self._offers[0]
        if not job.memory and self._spare:
            digests = job.offer.digests[job.num_good :]
            job.memory = tuple(self._spare.popleft() for _ in range(min(len(self._spare), len(digests))))
            pages = job.offer.pages[job.num_good :]
            try:
                self._host.carry_out([Store(page, memory) for page, memory in zip(pages, job.memory, strict=False)])
            except BaseException:
                self._spare.extend(job.memory)
                self._end_offer(job)
                raise
            job.stored = self._host.stored()
        if job.stored is not None and job.stored():
            job.stored = None
            digests = job.offer.digests[job.num_good : job.num_good + len(job.memory)]
            pages_bytes = [self._host.slot(memory) for memory in job.memory]
            done = partial(self._spare.extend, job.memory)
            self._disk.offer(job.offer.ticket, list(zip(digests, pages_bytes, strict=True)), done)

    def _take_offered(self, ended: Ended) -> None:
        job = self._offers[0]
        job.num_good += ended.num_good
        job.seconds += ended.seconds
        is_short, job.memory = ended.num_good < len(job.memory), ()
        if is_short or job.num_good == len(job.offer.digests):
            self._end_offer(job)

    def _end_offer(self, job: _Offering) -> None:
        self._offers.popleft()
        self._arrived.append(Arrival(job.offer.ticket, job.num_good, job.seconds))

    # ---- up

    def _begin(self, job: _Job) -> list[Fetch]:
        """Begins with what the host must fetch; what is on disk follows."""
        slots = [self._memory[source] for source in job.fetch.sources if isinstance(source, int)]
        if slots:
            return [self._part(job, slots)]
        self._queue(job)
        return []

    def _part(self, job: _Job, memory: Sequence[int]) -> Fetch:
        self._on_host[job.fetch.ticket] = job
        pages = job.fetch.pages[job.num_good : job.num_good + len(memory)]
        return Fetch(job.fetch.ticket, tuple(memory), pages)

    def _queue(self, job: _Job) -> None:
        self._waiting.append(job)
        if len(self._waiting) == 1:
            self._read(job)

    def _read(self, job: _Job) -> None:
        wanted = job.fetch.sources[job.num_good :][: len(self._incoming)]
        digests = [source for source in wanted if isinstance(source, bytes)]
        job.num_read = len(digests)
        memory = [self._host.slot(number) for number in self._incoming[: len(digests)]]
        self._disk.read(job.fetch.ticket, digests, memory)

    def _take_read(self, ended: Ended) -> None:
        job, num_good = self._waiting[0], ended.num_good
        job.seconds += ended.seconds
        job.disk_seconds += ended.seconds
        job.num_damaged += len(ended.lost)
        if num_good < job.num_read:
            # The pages after it are of no use without it.
            job.fetch = job.fetch._replace(sources=job.fetch.sources[: job.num_good + num_good])
        if not num_good:
            self._end(job)
            return
        try:
            self._host.carry_out([self._part(job, self._incoming[:num_good])])
        except BaseException:
            # The jobs behind it get their turn.
            self._end(job)
            raise

    def _take_part(self, job: _Job, arrival: Arrival) -> None:
        job.num_good += arrival.num_good
        job.seconds += arrival.seconds
        was_read = bool(self._waiting) and self._waiting[0] is job
        if was_read:
            job.disk_seconds += arrival.seconds
        if job.num_good == len(job.fetch.sources):
            self._end(job)
        elif was_read:
            self._read(job)
        else:
            self._queue(job)

    def _end(self, job: _Job) -> None:
        self._arrived.append(Arrival(job.fetch.ticket, job.num_good, job.seconds, job.disk_seconds, job.num_damaged))
        if self._waiting and self._waiting[0] is job:
            self._waiting.popleft()
            if self._waiting:
                self._read(self._waiting[0])

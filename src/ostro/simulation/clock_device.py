"""A device on a virtual clock that nobody waits for: a runner's steps and a page store's copies take as long as a table
says.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush

from ostro.engine import sequence
from ostro.engine.batch import Batch
from ostro.engine.page_store import Arrival, Fetch, Move, Offer, Spill, SpillState, Store, StoreState, Unshared
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput
from ostro.simulation.costs import CopyTimes, Work


class ClockRunner:
    """A runner without a device."""

    strides = 0
    failure = None

    def __init__(self, spec: RunnerSpec, seconds: Callable[[Work], float], contention: float = 0.0) -> None:
        """`contention` is how much longer a step takes for each second that the API process works beside it."""
        self._spec = spec
        self._seconds, self._contention = seconds, contention
        self.api_free_at = 0.0
        """When the API process will have passed on all requests so far."""
        self.now = 0.0
        """The host's time: it moves on to the end of what the host waits for."""
        self._free_at = 0.0
        """When the device will have done all that was launched."""
        self.busy_seconds = 0.0
        self.answers: dict[int, tuple[int, ...]] = {}
        """The tokens that each request generates, by request id; others follow them."""

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def occupy(self, seconds: float, *, after: float = 0.0) -> float:
        """Queues `seconds` of work on the device. Returns the time at which that is done."""
        self._free_at = max(self.now, self._free_at, after) + seconds
        return self._free_at

    def launch(self, batch: Batch) -> Step:
        seconds = self._seconds(Work.of(batch))
        beside = min(seconds, self.api_free_at - max(self.now, self._free_at))
        seconds += self._contention * max(0.0, beside)
        self.busy_seconds += seconds
        ends = self.occupy(seconds)

        def results() -> StepOutput:
            self.now = max(self.now, ends)
            return StepOutput(
                {seq.id: SampledToken(self._sampled(seq, chunk.end)) for chunk in batch.chunks for seq in chunk.samples}
            )

        return Step(results)

    def _sampled(self, seq: sequence.Sequence, end: int) -> int:
        answer, at = self.answers.get(seq.request.id, ()), end - seq.num_prompt
        # If the answer is unknown, a token that no other request has there, so that no two answers share a prefix.
        return answer[at] if at < len(answer) else (seq.request.seed + 7919 * end) % self._spec.vocab_size


class ClockStore(Unshared):
    """Memory and disk below a simulated engine's pages, on the runner's clock.

        steps   │ step 1 ──────│ step 2 ──────│ step 3 ──────│
        out            │ stored ── stored ──│                   the next step waits while more than `staged` are left
        in                    └─ after the steps and stores so far ──│ arrived
        disk              │ write ── write ── read ─────│        one after the other; what finds no room is dropped

    It has no bytes: where the real stores copy, it counts pages and seconds.
    """

    def __init__(self, runner: ClockRunner, copies: CopyTimes, *, num_slots: int, disk_pages: int) -> None:
        """The table must have times for each tier that has room."""
        assert copies.host is not None or not num_slots
        assert copies.disk is not None or not disk_pages
        self.num_slots = num_slots
        self._disk_pages = disk_pages
        self._runner, self._host, self._disk = runner, copies.host, copies.disk
        # When each stream will have done its work so far.
        self._out_free = self._in_free = self._disk_free = 0.0
        # When pages on their way out, and those to be written, will be gone.
        self._staged: deque[float] = deque()
        self._writing: deque[float] = deque()
        # Least recently used first.
        self._on_disk: OrderedDict[bytes, None] = OrderedDict()
        self._coming: list[tuple[float, int, Arrival]] = []

    @property
    def has_disk(self) -> bool:
        return bool(self._disk_pages)

    @property
    def on_disk(self) -> int:
        return len(self._on_disk)

    def holds(self, digest: bytes) -> bool:
        return digest in self._on_disk

    @property
    def under_way(self) -> Collection[int]:
        return [ticket for _, ticket, _ in self._coming]

    def carry_out(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Store():
                    self._store()
                case Spill():
                    self._spill(move)
                case Fetch():
                    self._fetch(move)
                case Offer():
                    raise AssertionError("there are no other engines to share with")
                case StoreState() | SpillState():
                    raise AssertionError("there are no states")

    def arrivals(self, timeout: float = 0.0) -> list[Arrival]:
        runner = self._runner
        if timeout and self._coming and self._coming[0][0] > runner.now:
            runner.now = min(self._coming[0][0], runner.now + timeout)
        arrived: list[Arrival] = []
        while self._coming and self._coming[0][0] <= runner.now:
            arrived.append(heappop(self._coming)[-1])
        return arrived

    def close(self, hot: Sequence[Spill | SpillState] = ()) -> None:
        """Writes nothing: nothing outlives a simulation."""

    def _store(self) -> None:
        """Copies a page to host memory."""
        assert self._host is not None
        self._runner.now += self._host.pause
        # Copied on the device first, once there is room for it.
        full = len(self._staged) == self._host.staged
        staged = self._runner.occupy(0.0, after=self._staged.popleft() if full else 0.0)
        self._out_free = max(self._out_free, staged) + self._host.out
        self._staged.append(self._out_free)

    def _spill(self, move: Spill) -> None:
        assert self._disk is not None, "there is no disk"
        while self._writing and self._writing[0] <= self._runner.now:
            self._writing.popleft()
        if len(self._writing) >= self._disk.waiting:
            return
        if self._host is None:
            self._runner.now += self._disk.pause
        elif move.slot is None:
            self._store()
        ready = max(self._runner.now, self._out_free)
        self._disk_free = max(self._disk_free, ready) + self._disk.write
        self._writing.append(self._disk_free)
        self._on_disk[move.digest] = None
        self._on_disk.move_to_end(move.digest)
        if len(self._on_disk) > self._disk_pages:
            self._on_disk.popitem(last=False)

    def _fetch(self, fetch: Fetch) -> None:
        num_slots = sum(isinstance(source, int) for source in fetch.sources)
        num_disk = 0
        for source in fetch.sources[num_slots:]:
            if source not in self._on_disk:
                break
            assert isinstance(source, bytes)
            self._on_disk.move_to_end(source)
            num_disk += 1
        seconds = disk_seconds = 0.0
        # The pages that it fills may be in use by the steps so far.
        ends = self._runner.occupy(0.0)
        if num_slots:
            ends, seconds = self._from_host(num_slots, ends)
        if num_disk:
            ends, disk_seconds = self._from_disk(num_disk, ends)
        arrival = Arrival(fetch.ticket, num_slots + num_disk, seconds + disk_seconds, disk_seconds)
        heappush(self._coming, (ends, fetch.ticket, arrival))

    def _from_host(self, pages: int, after: float) -> tuple[float, float]:
        """When the pages will have been copied from host memory, and how long that takes."""
        assert self._host is not None
        self._runner.now += pages * self._host.pause
        seconds = pages * self._host.back
        self._in_free = max(self._in_free, after, self._out_free, self._runner.now) + seconds
        return self._in_free, seconds

    def _from_disk(self, pages: int, after: float) -> tuple[float, float]:
        """Like `_from_host`. Below a GPU, pages from disk pass through host memory."""
        assert self._disk is not None
        reading = pages * self._disk.read
        self._disk_free = max(self._disk_free, after) + reading
        if self._host is None:
            return self._disk_free, reading
        ends, copying = self._from_host(pages, self._disk_free)
        return ends, reading + copying

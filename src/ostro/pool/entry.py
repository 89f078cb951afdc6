"""One model in the pool: its service while it has one, its users, its waiting requests, its memory. Owns the
transitions between its states; decides none of them.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from ostro.engine_process.handle import State
from ostro.engine_process.messages import ModelInfo
from ostro.errors import OstroError
from ostro.pool.budget import Footprint, Room
from ostro.pool.catalog import ModelSpec
from ostro.pool.files import Files


class Service(Protocol):
    """What the pool must know of a loaded model. `ModelService` is one."""

    @property
    def state(self) -> State: ...

    @property
    def failure(self) -> OstroError | None: ...

    @property
    def info(self) -> ModelInfo | None: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    async def start(self) -> None: ...

    async def settled(self) -> None: ...

    async def stop(self) -> None: ...


S = TypeVar("S", bound=Service)


class PoolState(StrEnum):
    AVAILABLE = "available"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Waiter(Generic[S]):
    """A request that waits for its model: it gets the service, lease included, or an error."""

    name: str | None
    """What the model was asked for as; None for the pool itself, which loads some at the start."""
    since: float
    told: "asyncio.Future[S | OstroError]"


class Entry(Generic[S]):
    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        """What it is loaded with, or will be."""
        self.latest = spec
        """As the catalog has it now."""
        self.pinned = spec.pinned
        self.state = PoolState.AVAILABLE
        self.service: S | None = None
        self.leases: Counter[str | None] = Counter()
        # Oldest first.
        self.waiters: dict[Waiter[S], None] = {}
        self.promise: tuple[float, float] | None = None
        """Since when somebody had waited who was told to come back, and until when that place in line is kept, or the
        model, if it is ready by then.
        """
        self.asked_to_go = False
        """It is unloaded when nobody uses it any more, whether others wait for room or not."""

        self.files: Files | None = None
        """Kept from when somebody waits for the model until its service has ended."""
        self.absent = False
        """Whether they were looked for, and must be fetched."""
        # At most one task looks for them or fetches them.
        self.bringing: asyncio.Task[Files | None] | None = None
        self.bringing_since = 0.0

        # At most one task brings its service up, and one ends it.
        self.coming: asyncio.Task[None] | None = None
        self.going: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        self.gone.set()

        self.footprint: Footprint | None = None
        """As measured when it was loaded last; before that as expected; None if nobody knows."""
        self.expecting: asyncio.Task[None] | None = None
        self.expected = False
        """Whether it was tried to foresee the footprint."""

        self.failure: OstroError | None = None
        self.num_failures = 0
        self.retry_at = 0.0

        self.began_at = 0.0
        self.ready_at: float | None = None
        """None until the service was ready once."""
        self.used_at: float | None = None
        self.load_seconds: float | None = None
        self.num_loads = 0
        self.num_evictions = 0
        self.evicted_at = 0.0
        """Those for whom it made room come first: who waits for it stands in line from then."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def in_use(self) -> int:
        return self.leases.total()

    @property
    def resident(self) -> bool:
        """Whether it takes room: from before its service starts until after that has ended."""
        return self.service is not None

    @property
    def fetching(self) -> bool:
        return self.bringing is not None and self.absent

    @property
    def leaving(self) -> bool:
        """Whether its room will be free once its last request has ended, whatever else happens."""
        return self.resident and (self.going is not None or self.asked_to_go)

    @property
    def room(self) -> Room:
        footprint = self.footprint or Footprint()
        return Room(1, footprint.bytes, footprint.device_bytes)

    @property
    def idle(self) -> bool:
        """Whether nobody would miss it now. While its engine starts again, those who wait for it would."""
        return not self.in_use and (self.state is not PoolState.LOADING or not self.waiters)

    def waiting_since(self, now: float) -> float | None:
        """When the oldest of those who wait for it came; None if nobody waits. Its place in line."""
        times = [waiter.since for waiter in self.waiters][:1]
        if self.promise is not None and self.promise[1] > now:
            times.append(self.promise[0])
        return max(min(times), self.evicted_at) if times else None

    def last_use(self) -> float:
        """When it was in use last, for an order by that. One that was never used counts from when it was ready."""
        return max(self.used_at or 0.0, self.ready_at or 0.0)

    # --- transitions ------------------------------------------------------------------------------------------------

    def begin_load(self, now: float) -> None:
        """Before its service is made, which may fail."""
        self.failure = None
        self.began_at = now

    def load(self, service: S) -> None:
        """available -> loading: the service takes room from now on."""
        assert self.service is None, "a model has one service"
        self.service = service
        self.state = PoolState.LOADING
        self.gone.clear()

    def reload(self, now: float) -> None:
        """ready -> loading: the service starts its engine again by itself."""
        self.state = PoolState.LOADING
        if self.coming is None:
            self.began_at = now

    def loaded(self, now: float) -> bool:
        """The service is up. Whether for the first time since it was made."""
        first = self.ready_at is None
        if first:
            self.num_loads += 1
            self.load_seconds = now - self.began_at
            self.ready_at = now
        self.num_failures = 0
        return first

    def open(self) -> None:
        """loading or draining -> ready: it takes requests."""
        self.state = PoolState.READY

    def drain(self) -> None:
        """ready -> draining: it takes no new requests."""
        self.state = PoolState.DRAINING

    def ask_to_go(self) -> None:
        """any -> draining: it goes once nobody uses it, whether its room is needed or not."""
        self.asked_to_go = True
        self.state = PoolState.DRAINING

    def fail(self, error: OstroError, now: float, pause: float) -> None:
        """any -> failed: tells all waiting requests, and any that arrive before the pause is over."""
        self.state = PoolState.FAILED
        self.asked_to_go = self.resident
        self.failure = error
        self.num_failures += 1
        self.retry_at = now + pause
        self.refuse(error)

    def revive(self, *, forgive: bool = False) -> None:
        """failed -> draining or available: it may be tried again. With `forgive`, as if it had never failed."""
        self.state = PoolState.DRAINING if self.resident else PoolState.AVAILABLE
        self.failure = None
        if forgive:
            self.num_failures = 0

    def make_room(self, now: float) -> None:
        """It is unloaded because others need its room."""
        self.num_evictions += 1
        self.evicted_at = now

    def retire(self, ending: asyncio.Task[None]) -> None:
        """Its service is being ended; one that has failed stays so."""
        self.going = ending
        if self.state is not PoolState.FAILED:
            self.state = PoolState.DRAINING

    def end(self) -> None:
        """draining -> available: its service has ended, and takes no room any more."""
        self.service = self.going = self.ready_at = None
        self.asked_to_go = self.expected = False
        self.renew()
        if self.state is not PoolState.FAILED:
            self.state = PoolState.AVAILABLE
        self.gone.set()

    def begin_bringing(self, task: "asyncio.Task[Files | None]", now: float) -> None:
        """Its files are looked for, or fetched."""
        self.bringing_since = now
        self.bringing = task

    def end_bringing(self, files: Files | None) -> None:
        """None if they were looked for in vain: then they must be fetched."""
        fetched, self.bringing = self.absent, None
        self.files = files
        self.absent = files is None and not fetched

    def abandon_bringing(self) -> None:
        """It was cancelled or has failed; the next try begins with a look."""
        self.bringing, self.absent = None, False

    # --- what it holds ----------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Takes up what the catalog says now, unless it is in the middle of something with what it said before."""
        if self.service is None and self.bringing is None and self.spec != self.latest:
            self.let_files_go()
            self.spec = self.latest

    def has_adapter(self, name: str | None) -> bool:
        return name is None or name in self.spec.config.adapter_names

    def let_files_go(self) -> None:
        if self.files is not None:
            self.files.close()
            self.files = None

    def lease(self, name: str | None, now: float) -> S:
        assert self.service is not None, "only a loaded model can be used"
        self.leases[name] += 1
        self.used_at = now
        self.promise = None
        return self.service

    def leave(self, name: str | None, now: float) -> None:
        self.leases[name] -= 1
        assert self.leases[name] >= 0, "a lease was given back twice"
        self.used_at = now

    def admit(self, now: float) -> None:
        """Lets in all who wait."""
        for waiter in self._dismissed():
            waiter.told.set_result(self.lease(waiter.name, now))

    def refuse(self, error: OstroError) -> None:
        """Sends away all who wait."""
        self.promise = None
        for waiter in self._dismissed():
            waiter.told.set_result(error)

    def _dismissed(self) -> list[Waiter[S]]:
        waiters, self.waiters = list(self.waiters), {}
        return waiters

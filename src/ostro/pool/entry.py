"""One model in the pool: its files and its service while it has them, its users, its waiting requests, its memory. Owns
the transitions between its states; decides none of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from ostro.engine_process.handle import State
from ostro.engine_process.messages import ModelInfo
from ostro.errors import OstroError
from ostro.pool.budget import Footprint, Room
from ostro.pool.catalog import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """A model's files on this machine, protected from deletion until `close` is called."""

    path: str
    name: str | None
    """The source's name for the model; None if it follows from the files."""
    close: Callable[[], None]
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and directories of its adapters."""
    tokenizer: str | None = None
    """The tokenizer's path, if it was configured separately."""


class ModelFiles(Protocol):
    """Brings files of models and adapters to this machine. Both methods raise OstroError, and stop when cancelled."""

    async def find(self, spec: ModelSpec) -> Files | None:
        """Files that are already here, quickly; None if they must be downloaded."""

    async def fetch(self, spec: ModelSpec) -> Files:
        """May take any amount of time. If cancelled, downloaded bytes are kept."""


class Service(Protocol):
    """The pool's view of a loaded model; implemented by `ModelService`."""

    @property
    def state(self) -> State: ...

    @property
    def failure(self) -> OstroError | None: ...

    @property
    def refusal(self) -> OstroError | None:
        """Why it takes no requests, however long they would wait."""

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
    """A request waiting for its model: it gets the service, including a lease, or an error."""

    name: str | None
    """The model's name in the request; None for the pool itself, which loads some at startup."""
    since: float
    told: "asyncio.Future[S | OstroError]"
    key: str | None = None
    """Whose request it is."""


class Promise(NamedTuple):
    """For a client told to retry."""

    since: float
    """When its wait began."""
    until: float
    """Until when its place in the queue, or the loaded model, is kept for it."""
    key: str | None


class Place(NamedTuple):
    """A model's place in the queue: by turn, then by its oldest request."""

    turn: float
    """When its request arrived, or when the last model was loaded for the same key, if that is later."""
    since: float
    key: str | None
    """Whose turn it is."""


class Entry(Generic[S]):
    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        """The settings it is or will be loaded with."""
        self.latest = spec
        """The catalog's current settings."""
        self.pinned = spec.pinned
        self.state = PoolState.AVAILABLE
        self.service: S | None = None
        self.leases: Counter[str | None] = Counter()
        # Oldest first.
        self.waiters: dict[Waiter[S], None] = {}
        self.promise: Promise | None = None
        self.asked_to_go = False
        """Whether to unload it as soon as it is unused, even if nobody needs the memory."""

        self.files: Files | None = None
        """Held from the first waiting request until the service has ended."""
        self.absent = False
        """Whether they were not found locally and must be downloaded."""
        # At most one task finds or downloads them.
        self.bringing: asyncio.Task[Files | None] | None = None
        self.bringing_since = 0.0

        # At most one task starts its service, and one stops it.
        self.coming: asyncio.Task[None] | None = None
        self.going: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        self.gone.set()

        self.footprint: Footprint | None = None
        """Memory use as measured on the last load, or estimated before the first; None if unknown."""
        self.expecting: asyncio.Task[None] | None = None
        self.expected = False
        """Whether an estimate was attempted."""

        self.failure: OstroError | None = None
        self.num_failures = 0
        self.retry_at = 0.0

        self.loaded_for: str | None = None
        """The key whose turn it was when it was last loaded."""
        self.began_at = 0.0
        self.ready_at: float | None = None
        """When the service was first ready; None until then."""
        self.used_at: float | None = None
        self.load_seconds: float | None = None
        self.num_loads = 0
        self.num_evictions = 0
        self.evicted_at = 0.0
        """When it was evicted for others: requests for it queue from then, behind those it made room for."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def in_use(self) -> int:
        return self.leases.total()

    @property
    def resident(self) -> bool:
        """Whether it takes up memory: from before its service starts until after it has ended."""
        return self.service is not None

    @property
    def fetching(self) -> bool:
        return self.bringing is not None and self.absent

    @property
    def leaving(self) -> bool:
        """Whether its memory will be free once its last request has ended, whatever else happens."""
        return self.resident and (self.going is not None or self.asked_to_go)

    @property
    def room(self) -> Room:
        footprint = self.footprint or Footprint()
        return Room(1, footprint.bytes, footprint.device_bytes)

    @property
    def idle(self) -> bool:
        """Whether nobody would miss it now. While its engine restarts, waiting requests would."""
        return not self.in_use and (self.state is not PoolState.LOADING or not self.waiters)

    def waiting_since(self, now: float) -> float | None:
        """Arrival time of its oldest waiting request; None if there is none."""
        times = [waiter.since for waiter in self.waiters][:1]
        if self.promise is not None and self.promise.until > now:
            times.append(self.promise.since)
        return max(min(times), self.evicted_at) if times else None

    def place(self, now: float, turns: Mapping[str | None, float]) -> Place | None:
        """Its place in the queue; None if nobody waits for it. `turns` says when a model was last loaded for a key: its
        other models queue from then, so that a key that asks for many waits behind its own and not ahead of others'.
        """
        since = self.waiting_since(now)
        if since is None:
            return None
        turn, key = min(
            ((max(asked, turns.get(key, asked)), key) for asked, key in self._asked(now)), key=lambda place: place[0]
        )
        return Place(max(turn, self.evicted_at), since, key)

    def _asked(self, now: float) -> Iterator[tuple[float, str | None]]:
        """When each key first asked for it."""
        if self.promise is not None and self.promise.until > now:
            yield self.promise.since, self.promise.key
        told: set[str | None] = set()
        for waiter in self.waiters:
            if waiter.key not in told:
                told.add(waiter.key)
                yield waiter.since, waiter.key

    def last_use(self) -> float:
        """When it was last used, for LRU order. If never used, when it became ready."""
        return max(self.used_at or 0.0, self.ready_at or 0.0)

    # --- transitions ------------------------------------------------------------------------------------------------

    def begin_load(self, now: float, key: str | None = None) -> None:
        """Called before its service is created, which may fail."""
        self.failure = None
        self.loaded_for = key
        self.began_at = now

    def load(self, service: S) -> None:
        """available -> loading: from now on the service takes up memory."""
        assert self.service is None, "a model has one service"
        self.service = service
        self.state = PoolState.LOADING
        self.gone.clear()

    def reload(self, now: float) -> None:
        """ready -> loading: the service restarts its engine by itself."""
        self.state = PoolState.LOADING
        if self.coming is None:
            self.began_at = now

    def loaded(self, now: float) -> bool:
        """The service is up. Returns whether this is the first time since it was created."""
        first = self.ready_at is None
        if first:
            self.num_loads += 1
            self.load_seconds = now - self.began_at
            self.ready_at = now
        self.num_failures = 0
        return first

    def open(self) -> None:
        """loading or draining -> ready: accepts requests."""
        self.state = PoolState.READY

    def drain(self) -> None:
        """ready -> draining: accepts no new requests."""
        self.state = PoolState.DRAINING

    def ask_to_go(self) -> None:
        """any -> draining: unloads once unused, whether or not its memory is needed."""
        self.asked_to_go = True
        self.state = PoolState.DRAINING

    def fail(self, error: OstroError, now: float, pause: float) -> None:
        """any -> failed: rejects all waiting requests, and new ones until the pause is over."""
        self.state = PoolState.FAILED
        self.asked_to_go = self.resident
        self.failure = error
        self.num_failures += 1
        self.retry_at = now + pause
        self.refuse(error)

    def revive(self, *, forgive: bool = False) -> None:
        """failed -> draining or available: may be tried again. With `forgive`, as if it had never failed."""
        self.state = PoolState.DRAINING if self.resident else PoolState.AVAILABLE
        self.failure = None
        if forgive:
            self.num_failures = 0

    def make_room(self, now: float) -> None:
        """Records that it is evicted for others."""
        self.num_evictions += 1
        self.evicted_at = now

    def retire(self, ending: asyncio.Task[None]) -> None:
        """Its service is being stopped; a failed entry stays failed."""
        self.going = ending
        if self.state is not PoolState.FAILED:
            self.state = PoolState.DRAINING

    def end(self) -> None:
        """draining -> available: its service has ended and takes no more memory."""
        self.service = self.going = self.ready_at = None
        self.asked_to_go = self.expected = False
        self.renew()
        if self.state is not PoolState.FAILED:
            self.state = PoolState.AVAILABLE
        self.gone.set()

    def begin_bringing(self, task: "asyncio.Task[Files | None]", now: float) -> None:
        """Its files are being found or downloaded."""
        self.bringing_since = now
        self.bringing = task

    def end_bringing(self, files: Files | None) -> None:
        """Takes the files; None if they were not found locally and must be downloaded."""
        fetched, self.bringing = self.absent, None
        self.files = files
        self.absent = files is None and not fetched

    def abandon_bringing(self) -> None:
        """Cancelled or failed; the next attempt starts by looking locally."""
        self.bringing, self.absent = None, False

    # --- resources --------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Adopts the catalog's current settings, unless it is in use with the previous ones."""
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
        """Admits all waiting requests."""
        for waiter in self._dismissed():
            waiter.told.set_result(self.lease(waiter.name, now))

    def refuse(self, error: OstroError) -> None:
        """Rejects all waiting requests."""
        self.promise = None
        for waiter in self._dismissed():
            waiter.told.set_result(error)

    def _dismissed(self) -> list[Waiter[S]]:
        waiters, self.waiters = list(self.waiters), {}
        return waiters

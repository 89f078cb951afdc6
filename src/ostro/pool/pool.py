"""The loaded models: loads each once for any number of requests, makes room first, and never interrupts a request.
Carries out the `decisions`; knows services by their protocol; knows no HTTP, no tokens, no files.

    async with pool.use("org/model") as (spec, service): ...     # waits until it is ready; in use until left

    available ──> loading ──> ready ──> draining ──> available       a draining model takes no new requests; when the
     │  ▲  ▲       │   ▲        │           │                        last one has ended, its service is stopped, and
     ▼  │  │       │   └────────┘           └──> ready               only then the next one starts
    fetching       ▼   its engine died       its memory is no longer needed
           └──── failed   reported to all requests until it is time to retry

A model is downloaded before it gets memory: nothing is evicted for one that is still downloading, and its memory use is
estimated from the files.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

from ostro.engine_process.handle import State
from ostro.errors import ModelError, ModelNotFound, OstroError, Unavailable, UnknownModel, Unsupported
from ostro.pool.budget import Footprint, PoolLimits
from ostro.pool.catalog import Catalog, ModelSpec, resolve
from ostro.pool.decisions import decide, idle_for, too_large
from ostro.pool.entry import Entry, Files, ModelFiles, PoolState, Promise, S, Service, Waiter

__all__ = [
    "Files",
    "Footprint",
    "ModelPool",
    "ModelView",
    "PoolCounters",
    "PoolLimits",
    "PoolState",
    "Service",
]

_LOOK_SECONDS = 0.5
# A slower estimate is not worth the wait.
_EXPECT_SECONDS = 10.0
_SOONEST = 0.001
_LONGEST_RETRY_PAUSE = 600.0
_LONGEST_RETRY_AFTER = 60
# Used until a load has been measured.
_LOAD_GUESS = 5.0
_EVICTED_KEPT = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView(Generic[S]):
    """A snapshot of one model. An adapter shows its base's state, and its own requests."""

    name: str
    state: PoolState
    """The model's state; FETCHING and LOADING include waiting in the queue for it."""
    pinned: bool
    in_use: int
    """Requests under this name that are using the model now."""
    waiting: int
    bytes: int
    """Host memory in use; 0 for an adapter, which is counted with its base."""
    device_bytes: int
    load_seconds: float | None
    """Duration of the last load."""
    loads: int
    evictions: int
    last_used: float | None
    """Seconds since the last use."""
    failure: str | None
    spec: ModelSpec
    service: S | None


@dataclass(slots=True)
class PoolCounters:
    loads: int = 0
    """Successful loads."""
    evictions: int = 0
    """Models unloaded because another needed their memory."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed loads by error class."""
    evicted: deque[str] = field(default_factory=lambda: deque(maxlen=_EVICTED_KEPT))
    """The latest evictions, oldest first."""


class ModelPool(Generic[S]):
    """Use within one event loop. For loading and unloading, an adapter's name stands for its base."""

    def __init__(
        self,
        catalog: Catalog,
        make: Callable[[ModelSpec, Files | None], S],
        limits: PoolLimits,
        *,
        model_files: ModelFiles | None = None,
        expected: Callable[[ModelSpec, Files | None], Awaitable[Footprint | ModelError | None]] | None = None,
        patience: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` returns a service that is not started; `expected` estimates a model's memory before its first load, or
        returns why it can never be loaded here. Both get the files from `model_files`, or None without it. `patience`
        is how long a request waits before models in use are drained for it.
        """
        self.catalog = catalog
        self.limits = limits
        self.counters = PoolCounters()
        self._make = make
        self._model_files = model_files
        self._expected = expected
        self._patience = patience
        self._clock = clock
        self._entries: dict[str, Entry[S]] = {}
        # Maps a name to that of its entry: its own, or its base's.
        self._bases: dict[str, str] = {}
        self._turns: dict[str | None, float] = {}
        """When a model was last loaded for a key, while requests wait."""
        self._stopped = False
        self._chores: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Starts loading the pinned models and the default one; returns at once."""
        self._chores = [
            asyncio.create_task(self._load_first_models(), name="first models"),
            asyncio.create_task(self._look_after_models(), name="pool"),
        ]

    async def stop(self) -> None:
        """Stops all services, including those still loading. Waiting requests get Unavailable."""
        self._stopped = True
        self.catalog.close()
        if self._timer is not None:
            self._timer.cancel()
        ending: list[asyncio.Task[Any]] = list(self._chores)
        for entry in self._entries.values():
            entry.refuse(_shutting_down())
            ending += [task for task in (entry.expecting, entry.bringing) if task is not None]
        for task in ending:
            task.cancel()
        ending += [self._retire(entry) for entry in self._entries.values() if entry.resident]
        if ending:
            await asyncio.wait(ending)
        for entry in self._entries.values():
            entry.let_files_go()

    def use(self, name: str, key: str | None = None) -> AbstractAsyncContextManager[tuple[ModelSpec, S]]:
        """The model, once it is ready; it stays loaded until the block is left, possibly by another task. Keys that
        wait for models take turns.

        Raises ModelNotFound, the error that keeps the model from loading, or Unavailable if that takes too long.
        """
        return self._use(name, key)

    async def load(self, name: str) -> None:
        """Waits until it is loaded, like `use`. The load continues even if nobody waits any more."""
        async with self._use(name, None):
            pass

    async def unload(self, name: str, *, wait: bool = True) -> bool:
        """Unloads it once its running requests have ended; with `wait`, returns then. New requests wait and reload it.

        Returns whether it was loaded or about to be. Applies to pinned models too; a failed one may be retried at once.
        Raises Unsupported if the limits say that models stay.
        """
        if not self.limits.unloads:
            raise Unsupported(
                "Several hosts run this model together, and the others would not unload it. Stop their servers instead."
            )
        _, entry = await self._find(name)
        failed = entry.state is PoolState.FAILED
        if failed:
            entry.revive(forgive=True)
        if entry.bringing is not None:
            entry.refuse(Unavailable(f"{entry.name} was unloaded while it was downloading. Ask again to load it."))
            entry.bringing.cancel()
            await asyncio.wait([entry.bringing])
            return True
        if not entry.resident:
            return False
        if entry.ready_at is None:
            entry.refuse(Unavailable(f"{entry.name} was unloaded while it was loading. Ask again to load it."))
        self._ask_to_go(entry)
        if wait:
            await entry.gone.wait()
        return not failed

    async def pin(self, name: str, pinned: bool) -> None:
        """Sets whether it is exempt from eviction. Loads nothing."""
        _, entry = await self._find(name)
        entry.pinned = pinned
        self._decide()

    def views(self) -> list[ModelView[S]]:
        """All models in catalog order, then those that are loaded but no longer in the catalog."""
        specs = self.catalog.specs()
        known = {spec.name for spec in specs}
        return [
            *map(self.view_of, specs),
            *(view for view in self.touched() if view.service is not None and view.name not in known),
        ]

    def touched(self) -> list[ModelView[S]]:
        """Models requested at least once, without adapters: possibly far fewer than there are."""
        return [self.view_of(entry.spec) for entry in self._entries.values()]

    def view_of(self, spec: ModelSpec) -> ModelView[S]:
        entry = self._entries.get(self._bases.get(spec.name, spec.base or spec.name))
        return _untouched(spec) if entry is None else self._view(spec, entry)

    async def spec(self, name: str) -> ModelSpec:
        """What a name stands for, in the catalog or still loaded. Loads nothing. Raises ModelNotFound."""
        try:
            return await self.catalog.find(name)
        except ModelNotFound:
            # No longer in the catalog, but a loaded model is still served.
            loaded = resolve(name, [entry.name for entry in self._entries.values() if entry.resident])
            if loaded is None:
                raise
            return self._entries[loaded].spec

    @asynccontextmanager
    async def _use(self, name: str, key: str | None) -> AsyncIterator[tuple[ModelSpec, S]]:
        spec, entry = await self._find(name)
        service = await self._enter_with_adapter(entry, spec, key)
        try:
            yield spec, service
        finally:
            self._leave(entry, spec.name)

    async def _find(self, name: str) -> tuple[ModelSpec, Entry[S]]:
        spec = await self.spec(name)
        base = spec if spec.base is None else await self.catalog.find(spec.base)
        if base.base is not None:
            raise ModelError(
                f"The base of {spec.name} is {base.name}, which is an adapter too. Name a full model as its base."
            )
        self._bases[spec.name] = base.name
        entry = self._entries.get(base.name)
        if entry is None:
            entry = self._entries[base.name] = Entry(base)
        entry.latest = base
        entry.renew()
        return spec, entry

    async def _enter_with_adapter(self, entry: Entry[S], spec: ModelSpec, key: str | None) -> S:
        """Like `_enter`. A base that was loaded before the adapter was found is reloaded once it is idle."""
        until = self._clock() + self.limits.wait_seconds
        while True:
            service = await self._enter(entry, spec.name, max(0.0, until - self._clock()), key)
            if entry.has_adapter(spec.adapter):
                return service
            self._leave(entry, spec.name)
            if spec.adapter not in entry.latest.config.adapter_names:
                raise UnknownModel(f"{spec.name} is no longer there. Ask for another model.")
            if entry.state is PoolState.READY:
                _log.info("%s is being reloaded with adapters found since: %s was requested.", entry.name, spec.name)
                self._ask_to_go(entry)

    async def _enter(self, entry: Entry[S], name: str | None, seconds: float | None, key: str | None = None) -> S:
        """Waits for a lease; `_leave` returns it."""
        if self._stopped:
            raise _shutting_down()
        now = self._clock()
        self._look(entry)
        if entry.state is PoolState.READY:
            return entry.lease(name, now)
        if entry.state is PoolState.FAILED:
            if now < entry.retry_at:
                assert entry.failure is not None
                raise entry.failure.with_traceback(None)
            entry.revive()
        if entry.service is not None and (refusal := entry.service.refusal) is not None:
            raise refusal
        waiter: Waiter[S] = Waiter(name, now, asyncio.get_running_loop().create_future(), key)
        entry.waiters[waiter] = None
        self._decide()
        try:
            await asyncio.wait([waiter.told], timeout=seconds)
        except asyncio.CancelledError:
            self._withdraw(entry, waiter)
            raise
        if not waiter.told.done():
            error = self._keep_place(entry, waiter)
            self._withdraw(entry, waiter)
            raise error
        outcome = waiter.told.result()
        if isinstance(outcome, OstroError):
            # The same error is raised repeatedly: it must not accumulate tracebacks.
            raise outcome.with_traceback(None)
        return outcome

    def _leave(self, entry: Entry[S], name: str | None) -> None:
        entry.leave(name, self._clock())
        if not entry.in_use:
            self._decide()

    def _withdraw(self, entry: Entry[S], waiter: Waiter[S]) -> None:
        if waiter in entry.waiters:
            del entry.waiters[waiter]
            self._decide()
        elif not isinstance(waiter.told.result(), OstroError):
            # The lease was granted at the very moment of the timeout.
            self._leave(entry, waiter.name)

    def _keep_place(self, entry: Entry[S], waiter: Waiter[S]) -> Unavailable:
        """Tells a client when to retry, and keeps its place in the queue until then. Otherwise a model that does not
        get room within one request's time would start at the end of the queue every time.
        """
        now = self._clock()
        retry_after = self._retry_after(entry, now)
        since = min(waiter.since, entry.waiting_since(now) or waiter.since)
        entry.promise = Promise(since, now + retry_after + max(1.0, self._patience), waiter.key)
        waited = f"{now - waiter.since:.0f} s"
        if entry.fetching:
            message = f"{entry.name} is still being fetched after a wait of {waited}. Try again in {retry_after} s."
        elif entry.state is PoolState.LOADING:
            message = f"{entry.name} is still loading after a wait of {waited}. Try again in {retry_after} s."
        else:
            message = f"There is no room for {entry.name} yet, after a wait of {waited}. Try again in {retry_after} s."
        return Unavailable(message, retry_after=retry_after)

    def _retry_after(self, entry: Entry[S], now: float) -> int:
        """Estimated seconds until it is ready, from past load times."""
        measured = [other.load_seconds for other in self._entries.values() if other.load_seconds is not None]
        usual = sum(measured) / len(measured) if measured else _LOAD_GUESS
        left = usual if entry.load_seconds is None else entry.load_seconds
        # A load that already takes longer than any before may well take as long again.
        if entry.fetching:
            left += now - entry.bringing_since
        elif entry.state is PoolState.LOADING:
            spent = now - entry.began_at
            left = left - spent if spent < left else spent
        return min(max(1, math.ceil(left)), _LONGEST_RETRY_AFTER)

    def _decide(self) -> None:
        """Does everything possible now, and schedules a look at the rest. Never waits."""
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        for entry in self._entries.values():
            if entry.leaving and not entry.in_use:
                self._retire(entry)
            if not entry.resident and (entry.state is PoolState.FAILED or entry.waiting_since(now) is None):
                entry.let_files_go()
        if all(entry.waiting_since(now) is None for entry in self._entries.values()):
            # Nobody waits: all keys are equal again.
            self._turns.clear()
        decisions = decide(
            self._entries.values(),
            self.limits,
            turns=self._turns,
            needs_files=self._model_files is not None,
            patience=self._patience,
            now=now,
        )
        for entry in (*decisions.find, *decisions.fetch):
            self._bring(entry)
        for entry in decisions.abandon:
            _log.info(
                "The download of %s was cancelled: no request waits for it, and other downloads are waiting.",
                entry.name,
            )
            assert entry.bringing is not None
            entry.bringing.cancel()
        for entry in decisions.expect:
            self._expect(entry)
        for entry, error in decisions.refuse:
            if isinstance(error, ModelError):
                self._fail(entry, error)
            else:
                entry.refuse(error)
        for entry in decisions.evict:
            self._evict(entry)
        for entry in decisions.load:
            self._load(entry)
        self._drain(decisions.drain)
        self._decide_in(decisions.again_at - now)

    def _decide_in(self, seconds: float) -> None:
        """Decides after `seconds`, or sooner if that is already scheduled."""
        loop = asyncio.get_running_loop()
        when = loop.time() + max(_SOONEST, seconds)
        if when < (math.inf if self._timer is None else self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(when, self._decide)

    def _drain(self, wanted: list[Entry[S]]) -> None:
        for entry in wanted:
            if entry.state is not PoolState.DRAINING:
                _log.info("%s takes no new requests: other models are waiting for its memory.", entry.name)
                entry.drain()
                if not entry.in_use:
                    self._decide_in(0)
        for entry in self._entries.values():
            if entry.state is PoolState.DRAINING and not entry.leaving and entry not in wanted:
                entry.open()
                self._look(entry)
                self._admit_if_ready(entry)

    def _admit_if_ready(self, entry: Entry[S]) -> None:
        if entry.state is PoolState.READY:
            entry.admit(self._clock())

    def _bring(self, entry: Entry[S]) -> None:
        """Looks for its files; if they were not found, downloads them."""
        bringing = asyncio.create_task(self._files_of(entry), name=f"bring {entry.name}")
        bringing.add_done_callback(lambda task: self._take_files(entry, task))
        entry.begin_bringing(bringing, self._clock())

    async def _files_of(self, entry: Entry[S]) -> Files | None:
        assert self._model_files is not None
        return await (self._model_files.fetch(entry.spec) if entry.absent else self._model_files.find(entry.spec))

    def _take_files(self, entry: Entry[S], brought: asyncio.Task[Files | None]) -> None:
        if brought.cancelled():
            entry.abandon_bringing()
        elif (error := brought.exception()) is None:
            entry.end_bringing(brought.result())
        else:
            entry.abandon_bringing()
            message = f"Cannot get the files of {entry.name} ({error!r}). See the server's log."
            self._fail(entry, error if isinstance(error, OstroError) else ModelError(message))
        self._decide()

    def _expect(self, entry: Entry[S]) -> None:
        if entry.expecting is None:
            entry.expecting = asyncio.create_task(self._foresee(entry), name=f"expect {entry.name}")

    async def _foresee(self, entry: Entry[S]) -> None:
        outcome = await self._estimate(entry)
        entry.expecting = None
        if isinstance(outcome, ModelError):
            self._fail(entry, outcome)
            return
        entry.footprint, entry.expected = outcome, True
        self._decide()

    async def _estimate(self, entry: Entry[S]) -> Footprint | ModelError | None:
        if self._expected is None:
            return None
        try:
            async with asyncio.timeout(_EXPECT_SECONDS):
                return await self._expected(entry.spec, entry.files)
        except Exception as error:  # noqa: BLE001
            # If something is wrong with the model, loading it gives a better error.
            _log.info("The memory that %s will need is unknown: %r", entry.name, error)
            return None

    def _load(self, entry: Entry[S]) -> None:
        now = self._clock()
        place = entry.place(now, self._turns)
        entry.begin_load(now, None if place is None else place.key)
        self._turns[entry.loaded_for] = now
        try:
            service = self._make(entry.spec, entry.files)
        except OstroError as error:
            self._fail(entry, error)
            return
        entry.load(service)
        entry.coming = asyncio.create_task(self._bring_up(entry, service), name=f"load {entry.name}")

    async def _bring_up(self, entry: Entry[S], service: S) -> None:
        """Waits for a service to become ready: a new one, or one that is restarting its engine."""
        error = await _settled(service, start=entry.ready_at is None)
        if error is None:
            entry.footprint = _measured(service)
            error = too_large(entry, self.limits)
        if error is not None:
            entry.coming = None
            self._fail(entry, error)
            return
        idle = idle_for(entry, list(self._entries.values()), self.limits)
        if idle:
            await asyncio.wait([self._evict(other) for other in idle])
        entry.coming = None
        if entry.loaded(self._clock()):
            self.counters.loads += 1
            self._turns[entry.loaded_for] = self._clock()
        if idle is None:
            # Larger than expected, and all others are in use. Its size is known now, so it queues for that much.
            _log.warning("%s does not fit next to the models in use and was unloaded again.", entry.name)
            self._retire(entry)
        elif entry.state is PoolState.LOADING:
            entry.open()
            self._look(entry)
            self._admit_if_ready(entry)
        self._decide()

    def _look(self, entry: Entry[S]) -> None:
        """Notices if a service that was ready no longer is, or if there is no point in waiting for it."""
        if entry.service is not None and (refusal := entry.service.refusal) is not None:
            entry.refuse(refusal)
        if entry.state is not PoolState.READY or entry.service is None:
            return
        match entry.service.state:
            case State.READY:
                pass
            case State.LOADING:
                entry.reload(self._clock())
                if entry.coming is None:
                    entry.coming = asyncio.create_task(
                        self._bring_up(entry, entry.service), name=f"reload {entry.name}"
                    )
            case State.FAILED | State.STOPPED:
                failure = entry.service.failure or Unavailable(f"The engine of {entry.name} has stopped. Try again.")
                self._fail(entry, failure)

    def _fail(self, entry: Entry[S], error: OstroError) -> None:
        longest = max(_LONGEST_RETRY_PAUSE, self.limits.retry_seconds)
        pause = min(self.limits.retry_seconds * 2.0 ** min(entry.num_failures, 32), longest)
        self.counters.failures[type(error).__name__] += 1
        entry.fail(error, self._clock(), pause)
        # Not immediately: this may run while decisions are being carried out.
        self._decide_in(0)

    def _ask_to_go(self, entry: Entry[S]) -> None:
        entry.ask_to_go()
        self._decide()

    def _evict(self, entry: Entry[S]) -> asyncio.Task[None]:
        self.counters.evictions += 1
        self.counters.evicted.append(entry.name)
        entry.make_room(self._clock())
        _log.info("%s was evicted to make room.", entry.name)
        return self._retire(entry)

    def _retire(self, entry: Entry[S]) -> asyncio.Task[None]:
        """Stops its service."""
        if entry.going is None:
            entry.retire(asyncio.create_task(self._end(entry), name=f"unload {entry.name}"))
        assert entry.going is not None
        return entry.going

    async def _end(self, entry: Entry[S]) -> None:
        if entry.coming is not None:
            entry.coming.cancel()
            await asyncio.wait([entry.coming])
            entry.coming = None
        assert entry.service is not None
        [outcome] = await asyncio.gather(entry.service.stop(), return_exceptions=True)
        if outcome is not None:
            _log.error("The service of %s did not shut down cleanly: %r", entry.name, outcome)
        entry.end()
        self._decide()

    async def _load_first_models(self) -> None:
        """Pinned models first: their memory must be reserved. Those under roots are known only after listing; roots
        that cannot be listed are retried with growing pauses.
        """
        first = [spec.name for spec in self.catalog.specs() if spec.pinned]
        if self.catalog.default is not None and self.catalog.default.name not in first:
            first.append(self.catalog.default.name)
        pause = self.limits.retry_seconds
        async with asyncio.TaskGroup() as loads:
            for name in first:
                loads.create_task(self._load_first(name))
            while True:
                await self.catalog.refresh()
                found = [spec.name for spec in self.catalog.specs() if spec.pinned and spec.name not in first]
                for name in found:
                    loads.create_task(self._load_first(name))
                first += found
                if self.catalog.is_whole:
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_PAUSE)

    async def _load_first(self, name: str) -> None:
        try:
            _, entry = await self._find(name)
            await self._enter(entry, None, None)
        except OstroError:
            # Its view has the reason.
            pass
        else:
            self._leave(entry, None)

    async def _look_after_models(self) -> None:
        async with asyncio.TaskGroup() as retries:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                for entry in list(self._entries.values()):
                    self._look(entry)
                    if entry.pinned and entry.state is PoolState.FAILED and self._clock() >= entry.retry_at:
                        _log.info("%s is pinned and failed: trying again.", entry.name)
                        retries.create_task(self._load_first(entry.name))
                    if self._unused(entry):
                        _log.info("%s was idle and has been unloaded.", entry.name)
                        self._ask_to_go(entry)
                # A reserved place in the queue may have expired.
                self._decide()

    def _unused(self, entry: Entry[S]) -> bool:
        longest = self.limits.idle_seconds
        if longest is None or entry.state is not PoolState.READY or entry.pinned or entry.in_use:
            return False
        return self._clock() - entry.last_use() >= longest

    def _view(self, spec: ModelSpec, entry: Entry[S]) -> ModelView[S]:
        whole = entry.resident and spec.base is None
        in_line = entry.state is PoolState.AVAILABLE and bool(entry.waiters)
        to_fetch = entry.fetching or (in_line and entry.absent)
        return ModelView(
            name=spec.name,
            state=PoolState.FETCHING if to_fetch else PoolState.LOADING if in_line else entry.state,
            pinned=entry.pinned,
            in_use=entry.leases[spec.name],
            waiting=sum(waiter.name == spec.name for waiter in entry.waiters),
            bytes=entry.room.bytes if whole else 0,
            device_bytes=entry.room.device_bytes if whole else 0,
            load_seconds=entry.load_seconds,
            loads=entry.num_loads,
            evictions=entry.num_evictions,
            last_used=None if entry.used_at is None else self._clock() - entry.used_at,
            failure=None if entry.failure is None else entry.failure.message,
            spec=spec,
            service=entry.service,
        )


def _untouched(spec: ModelSpec) -> ModelView[S]:
    return ModelView(
        name=spec.name,
        state=PoolState.AVAILABLE,
        pinned=spec.pinned,
        in_use=0,
        waiting=0,
        bytes=0,
        device_bytes=0,
        load_seconds=None,
        loads=0,
        evictions=0,
        last_used=None,
        failure=None,
        spec=spec,
        service=None,
    )


def _shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down.", retry_after=5)


async def _settled(service: Service, *, start: bool) -> OstroError | None:
    """Waits until it is ready; returns the error if it never will be."""

    async def settle() -> None:
        if start:
            await service.start()
        await service.settled()

    [outcome] = await asyncio.gather(settle(), return_exceptions=True)
    if outcome is None or isinstance(outcome, OstroError):
        return outcome
    return ModelError(f"The model cannot be loaded ({outcome!r}). See the server's log.")


def _measured(service: Service) -> Footprint:
    info = service.info
    assert info is not None, "a service that is ready knows its model"
    return Footprint(bytes=info.resident_bytes + info.pages_bytes, device_bytes=info.device_bytes)

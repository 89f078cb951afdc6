"""A world for the pool: services that take time and memory but compute nothing, on a clock that jumps to what is next.

In it an hour passes in a moment and always in the same order, and a pool that waits for what never comes is an error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ostro.config import EngineConfig
from ostro.engine_process.handle import State
from ostro.engine_process.messages import ModelInfo
from ostro.errors import OstroError, Unavailable
from ostro.pool.catalog import Catalog, ModelSpec
from ostro.pool.pool import Files, Footprint, ModelPool, ModelView, PoolLimits, PoolState

MIB = 1 << 20


def now() -> float:
    return asyncio.get_running_loop().time()


class FakeInfo(ModelInfo, frozen=True):
    device_bytes: int = 0


@dataclass
class Model:
    """A simulated model's behaviour."""

    load: float = 2.0
    stop: float = 0.25
    mib: int = 100
    device_mib: int = 0
    error: OstroError | None = None
    expected: bool = True
    """Whether its memory is known before it is loaded."""
    fetch: float = 0.0
    """Seconds that fetching its files takes, if nobody interrupts it."""
    fetch_error: OstroError | None = None


class FakeService:
    def __init__(self, world: "World", spec: ModelSpec) -> None:
        self.spec = spec
        self.model = world.models[spec.name]
        self.state = State.LOADING
        self.failure: OstroError | None = None
        self.refusal: OstroError | None = None
        self.info: ModelInfo | None = None
        self.restarts = 0
        self.num_requests = 0
        self._world = world
        self._changed = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._world.started(self)
        self._begin()

    async def settled(self) -> None:
        while self.state is not State.READY:
            if self.state in (State.FAILED, State.STOPPED):
                raise self.failure or Unavailable("The engine was stopped.")
            await self._changed.wait()

    async def stop(self) -> None:
        self._enter(State.STOPPED)
        self._world.check(self._world.ending or not self.num_requests, f"{self.spec.name} was stopped in use")
        if self._loading is not None:
            self._loading.cancel()
        await asyncio.sleep(self.model.stop)
        self._world.stopped(self)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Uses the model as a request does."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def die(self, error: OstroError | None = None) -> None:
        """The engine ends, and starts again by itself; with an error it does not."""
        if error is not None:
            self.failure = error
            self._enter(State.FAILED)
        else:
            self._enter(State.LOADING)
            self.restarts += 1
            self._begin()

    def _begin(self) -> None:
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        await asyncio.sleep(self.model.load)
        if self.state is not State.LOADING:
            return
        if self.model.error is not None:
            self.die(self.model.error)
            return
        self.info = FakeInfo(
            name=self.spec.name,
            max_len=1,
            vocab_size=1,
            generates=True,
            page_size=1,
            num_pages=1,
            load_seconds=self.model.load,
            warm_up_seconds=0.0,
            resident_bytes=self.model.mib * MIB,
            device_bytes=self.model.device_mib * MIB,
        )
        self._enter(State.READY)

    def _enter(self, state: State) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()


class FakeModelFiles:
    """Files that take time to get here and then stay."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.held: list[str] = []
        self.fetching: list[str] = []
        self.fetched: list[str] = []
        self._spent: dict[str, float] = {}

    async def find(self, spec: ModelSpec) -> Files | None:
        await asyncio.sleep(0.01)
        return None if self._left(spec.name) > 0 else self._files(spec.name)

    async def fetch(self, spec: ModelSpec) -> Files:
        name, began = spec.name, now()
        self.world.check(name not in self.fetching, f"{name} was fetched twice at a time")
        self.fetching.append(name)
        self.world.check(len(self.fetching) <= self.world.limits.fetches, "too many fetches")
        try:
            await asyncio.sleep(self._left(name))
        finally:
            self.fetching.remove(name)
            self._spent[name] = self._spent.get(name, 0.0) + now() - began
        if (error := self.world.models[name].fetch_error) is not None:
            self._spent[name] = 0.0
            raise error
        self.fetched.append(name)
        return self._files(name)

    def _left(self, name: str) -> float:
        left = self.world.models[name].fetch - self._spent.get(name, 0.0)
        return left if left > 1e-6 else 0.0

    def _files(self, name: str) -> Files:
        self.held.append(name)
        return Files(f"/cache/{name}", name, lambda: self.held.remove(name))


@dataclass
class World:
    models: dict[str, Model]
    limits: PoolLimits
    exact: bool = True
    """Whether all figures are known beforehand, so that the limits hold at every moment."""
    live: list[FakeService] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    """Starts and stops of services: +a, -a."""
    ending: bool = False
    wrong: list[str] = field(default_factory=list)

    def started(self, service: FakeService) -> None:
        name = service.spec.name
        self.check(all(other.spec.name != name for other in self.live), f"{name} was loaded twice at a time")
        self.live.append(service)
        self.history.append(f"+{name}")
        if self.exact:
            self.check_limits()

    def stopped(self, service: FakeService) -> None:
        if service in self.live:
            self.live.remove(service)
            self.history.append(f"-{service.spec.name}")

    def check_limits(self) -> None:
        limits, models = self.limits, [service.model for service in self.live]
        self.check(limits.models is None or len(models) <= limits.models, "too many models")
        self.check(limits.memory is None or sum(model.mib for model in models) * MIB <= limits.memory, "host memory")
        device_bytes = sum(model.device_mib for model in models) * MIB
        self.check(limits.device_memory is None or device_bytes <= limits.device_memory, "GPU memory")

    def check(self, right: bool, what: str) -> None:
        """Kept for the end: the pool would take an error for one of the service's."""
        if not right:
            self.wrong.append(f"{what} at {now()}")

    async def expected(self, spec: ModelSpec, files: Files | None) -> Footprint | None:
        await asyncio.sleep(0.1)
        model = self.models[spec.name]
        if not model.expected:
            return None
        return Footprint(bytes=model.mib * MIB, device_bytes=model.device_mib * MIB)


def no_roots(root: str) -> Sequence[ModelSpec]:
    raise AssertionError("there are no roots")


def a_spec(
    name: str, *, pinned: bool = False, base: str | None = None, place: str = ".", adapters: Sequence[str] = ()
) -> ModelSpec:
    config = EngineConfig(model=f"{place}/{name}", adapters=tuple((each, f"{place}/{each}") for each in adapters))
    return ModelSpec(name=name, config=config, pinned=pinned, base=base, adapter=None if base is None else name)


def a_catalog(*specs: ModelSpec) -> Catalog:
    return Catalog(specs, make=lambda spec: spec, list_models=no_roots)


class Pool(ModelPool[FakeService]):
    """A pool in a world of its own."""

    def __init__(
        self,
        world: dict[str, Model],
        *,
        pinned: Sequence[str] = (),
        adapters: dict[str, str] | None = None,
        patience: float = 1.0,
        exact: bool = True,
        **limits: Any,
    ) -> None:
        self.world = World(world, PoolLimits(**limits), exact)
        self.files = FakeModelFiles(self.world)
        self.made: list[FakeService] = []
        adapters = adapters or {}
        specs = [
            a_spec(name, pinned=name in pinned, adapters=[each for each, base in adapters.items() if base == name])
            for name in world
        ]
        specs += [a_spec(name, base=base) for name, base in adapters.items()]
        super().__init__(
            a_catalog(*specs),
            self._make_service,
            self.world.limits,
            model_files=self.files if any(model.fetch for model in world.values()) else None,
            expected=self.world.expected,
            patience=patience,
            clock=now,
        )

    def _make_service(self, spec: ModelSpec, files: Files | None) -> FakeService:
        self.world.check(files is None or spec.name in self.files.held, f"{spec.name} was loaded without its files")
        self.made.append(FakeService(self.world, spec))
        return self.made[-1]

    async def end(self) -> None:
        """Everything is over: nothing may be left of it."""
        await self.end_early()
        assert [(view.in_use, view.waiting) for view in self.views()] == [(0, 0)] * len(self.views())

    async def end_early(self) -> None:
        """With requests under way."""
        self.world.ending = True
        await self.stop()
        assert (self.world.live, self.files.held, self.files.fetching, self.world.wrong) == ([], [], [], [])

    def view(self, name: str) -> ModelView[FakeService]:
        return next(view for view in self.views() if view.name == name)

    def state(self, name: str) -> PoolState:
        return self.view(name).state

    def ready(self) -> set[str]:
        return {view.name for view in self.views() if view.state is PoolState.READY}

    def service(self, name: str) -> FakeService:
        service = self.view(name).service
        assert service is not None
        return service

    async def work(self, name: str, seconds: float = 1.0, key: str | None = None) -> str:
        """One request, from its arrival to its end. The name of the model that served it."""
        async with self.use(name, key) as (spec, service):
            assert service.state is State.READY
            with service.used():
                await asyncio.sleep(seconds)
            return spec.name

    def request(self, name: str, seconds: float = 1.0) -> asyncio.Task[str]:
        return asyncio.create_task(self.work(name, seconds))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def took(work: Awaitable[object]) -> float:
    began = now()
    await work
    return now() - began


async def outcome(work: Awaitable[object]) -> object:
    """Its result or its error."""
    [result] = await asyncio.gather(work, return_exceptions=True)
    return result

"""The models as endpoints see them: found by any name a client may use, and held while in use.

Knows names and the pool; knows no HTTP and no engine.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from ostro.config import EngineConfig
from ostro.engine.counters import Counters, ModelCounters
from ostro.errors import BadRequest, OstroError, Unavailable, UnknownModel
from ostro.pool.catalog import ModelSpec, resolve
from ostro.pool.pool import ModelPool, ModelView, PoolState
from ostro.sampling_defaults import SamplingDefaults
from ostro.server.models.plans import Outlook, Planner
from ostro.server.models.service import ModelService
from ostro.sources.aliases import find_alias
from ostro.sources.progress import Arrived

ANY = "default"
"""Model name of requests that name none."""

_COMING = (PoolState.FETCHING, PoolState.LOADING)
_AGAIN_SECONDS = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """One model, for the duration of a request."""

    name: str
    """The name in responses."""
    service: ModelService
    adapter: str | None = None


class Models:
    def __init__(
        self,
        pool: ModelPool[ModelService],
        *,
        served_names: Sequence[str] = (),
        any_name: bool = False,
        aliases: Mapping[str, str] | None = None,
        first: Sequence[str] = (),
        mentioned: Sequence[str] = (),
        arrived: Callable[[str], Arrived | None] = lambda name: None,
        planner: Planner | None = None,
    ) -> None:
        """`served_names` are the first model's names for clients, the first of which is used in responses; with
        `any_name`, it also answers to any name that is not another model's. `aliases` are other names of any model.
        `first` are loaded at startup. `mentioned` are names that occur in settings: a warning is logged if there is no
        such model. `arrived` says how much of a model has been downloaded, while it is.
        """
        self.pool = pool
        self.served_names = tuple(served_names)
        self._any_name = any_name
        self._aliases = dict(aliases or {})
        self._arrived = arrived
        self.planner = planner or Planner(EngineConfig())
        self.counters = ModelCounters()
        self._first = tuple(first)
        self._mentioned = tuple(mentioned)
        self._begun = False
        self._beginning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts loading the first models; does not wait for them."""
        await self.pool.start()
        self._beginning = asyncio.create_task(self._begin(), name="load the first models")

    async def stop(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        await self.pool.stop()

    async def offer_all(self) -> None:
        """Shares all models' cached prefixes with other servers, if the settings say so."""
        await asyncio.gather(*(service.offer_all() for _, service in self.loaded()))

    @asynccontextmanager
    async def use(self, name: str, key: str | None = None) -> AsyncIterator[Model]:
        """The model, loaded if necessary, and kept loaded until the block is left. Keys that wait for models take
        turns.
        """
        async with self.pool.use(await self._meant(name), key) as (spec, service):
            self.counters.note(spec.base or spec.name, service.counters)
            yield Model(self.shown(spec), service, spec.adapter)

    async def _meant(self, name: str) -> str:
        """Like `find`, but with `any_name`. Not for operators: a typo must not unload another model."""
        found, first = await self.find(name), self.pool.catalog.default
        if self._any_name and first is not None and resolve(found, [s.name for s in self.pool.catalog.specs()]) is None:
            return first.name
        return found

    async def find(self, name: str) -> str:
        """The pool's name of a model, given the client's. Returns names that are unknown here as they are."""
        name = self._aliases.get(name, name)
        first = self.pool.catalog.default
        if first is not None and name in (ANY, *self.served_names):
            return first.name
        if name == ANY:
            if not self.pool.catalog.specs():
                await self.pool.catalog.refresh_if_old()
            known = self.pool.catalog.specs()
            if len(known) > 1:
                raise BadRequest(
                    "There are several models here, so the request must name one. GET /v1/models lists them.",
                    param="model",
                )
            # If there is none, the catalog raises the right error.
            return known[0].name if known else name
        return name

    def views(self) -> list[ModelView[ModelService]]:
        return self.pool.views()

    async def view(self, name: str) -> ModelView[ModelService]:
        """Raises UnknownModel if no model has the name. Loads nothing."""
        return self.pool.view_of(await self.pool.spec(await self.find(name)))

    def arrived(self, spec: ModelSpec) -> Arrived | None:
        """How much of a model has been downloaded; None if it is not being downloaded, or its source does not tell."""
        return self._arrived(spec.base or spec.name)

    async def outlook(self, name: str) -> Outlook:
        """What is known before a model is loaded: one that is served, or one with a short name. Raises UnknownModel for
        all others.
        """
        try:
            view = await self.view(name)
        except UnknownModel:
            if (alias := find_alias(name)) is None:
                raise
            config = replace(self.planner.general, model=alias.name)
        else:
            config = view.spec.config
        # On the device of all, the memory of models that can be unloaded counts as free.
        freed = sum(each.bytes for each in self.pool.touched() if not each.pinned or each.spec.config is config)
        return await self.planner.outlook(config, freed=freed)

    async def recommended(self, view: ModelView[ModelService]) -> SamplingDefaults | None:
        """The sampling that a model's files recommend, loaded or not; None if that is not known."""
        if view.service is not None:
            return view.service.sampling_defaults
        return await self.planner.recommended(view.spec.config) if view.spec.base is None else None

    def loaded(self) -> list[tuple[str, ModelService]]:
        """Models that have an engine, by their names in responses."""
        return [(self.shown(view.spec), view.service) for view in self.pool.touched() if view.service is not None]

    def totals(self) -> list[tuple[str, Counters]]:
        """Each model's engine counters since startup, by its name in responses. Includes unloaded models."""
        touched = self.pool.touched()
        for view in touched:
            if view.service is not None:
                self.counters.note(view.name, view.service.counters)
        return [(self.shown(view.spec), self.counters.totals(view.name)) for view in touched]

    @property
    def first_name(self) -> str:
        first = self.pool.catalog.default
        return ANY if first is None else self.shown(first)

    @property
    def num_loads(self) -> int:
        return self.pool.counters.loads

    @property
    def num_evictions(self) -> int:
        return self.pool.counters.evictions

    @property
    def num_load_failures(self) -> int:
        return self.pool.counters.failures.total()

    def shown(self, spec: ModelSpec) -> str:
        """The model's name in responses."""
        return self.names(spec)[0]

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """All names of a model that are listed for clients."""
        first = self.pool.catalog.default
        is_first = first is not None and spec.name == first.name
        own = self.served_names if is_first and self.served_names else (spec.name,)
        meant = {spec.name, *((ANY, *self.served_names) if is_first else ())}
        return (*own, *(alias for alias, model in self._aliases.items() if model in meant))

    @property
    def only(self) -> ModelView[ModelService] | None:
        """The model of a server that serves only one, apart from its adapters; None if there may be several."""
        if not self.pool.catalog.is_fixed:
            return None
        whole = [spec for spec in self.pool.catalog.specs() if spec.base is None]
        return self.pool.view_of(whole[0]) if len(whole) == 1 else None

    @property
    def state(self) -> PoolState:
        """The server's readiness, which depends on the models that are loaded at startup.

        A server with a single model is in the state of that model. One with several is ready once all of them have
        loaded or failed, and stays ready: reloading one of them does not affect the others.
        """
        if (only := self.only) is not None:
            return PoolState.LOADING if only.state in _COMING else only.state
        return PoolState.READY if self._begun else PoolState.LOADING

    async def _begin(self) -> None:
        await asyncio.gather(*map(self._settle, self._first))
        await self._until_there_is_one()
        self._begun = True
        for name in self._mentioned:
            try:
                await self.pool.spec(name)
            except UnknownModel as error:
                _log.warning("The settings name a model that does not exist. %s", error)
            except OstroError:
                # Its root cannot be listed, which has been logged.
                pass

    async def _until_there_is_one(self) -> None:
        """Waits for a model to appear under the roots of a server that has no other."""
        catalog, told = self.pool.catalog, False
        while not catalog.specs():
            await catalog.refresh_if_old()
            if not catalog.specs():
                if not told:
                    _log.warning("No models are known yet. The server is ready as soon as there is one.")
                told = True
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _settle(self, name: str) -> None:
        """Waits until a model has loaded or failed."""
        with suppress(OstroError):
            while not await self._has_settled(name):
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _has_settled(self, name: str) -> bool:
        try:
            await self.pool.load(name)
        except Unavailable:
            # Loading takes longer than a request would wait, or there is no room for the model.
            return self.pool.view_of(await self.pool.spec(name)).state not in _COMING
        return True

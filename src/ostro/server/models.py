"""The models as endpoints see them: found by any name a client may use, and held while in use.

Knows names and the pool; knows no HTTP and no engine.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ostro.engine.counters import Counters
from ostro.engine_process.engine_counters import ModelCounters
from ostro.errors import BadRequest, OstroError, Unavailable, UnknownModel
from ostro.pool.catalog import ModelSpec
from ostro.pool.names import resolve
from ostro.pool.pool import ModelPool, ModelView, PoolState
from ostro.server.service import ModelService

ANY = "default"
"""What a request that names no model asks for."""

_COMING = (PoolState.FETCHING, PoolState.LOADING)
_AGAIN_SECONDS = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """One model, for the time of a request."""

    name: str
    """In answers."""
    service: ModelService
    adapter: str | None = None


class Models:
    def __init__(
        self,
        pool: ModelPool[ModelService],
        *,
        served_names: Sequence[str] = (),
        any_name: bool = False,
        first: Sequence[str] = (),
        mentioned: Sequence[str] = (),
    ) -> None:
        """`served_names` are what clients may call the first model, the first of them in answers; with `any_name` it
        answers to any name that is no other's. `first` are loaded at the start. `mentioned` are names that settings
        speak of: if there is no such model, that is told.
        """
        self.pool = pool
        self.served_names = tuple(served_names)
        self._any_name = any_name
        self.counters = ModelCounters()
        self._first = tuple(first)
        self._mentioned = tuple(mentioned)
        self._begun = False
        self._beginning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to load the first models; returns at once."""
        await self.pool.start()
        self._beginning = asyncio.create_task(self._begin(), name="first models have come")

    async def stop(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        await self.pool.stop()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """The model, loaded if need be, and kept until the block is left."""
        async with self.pool.use(await self._meant(name)) as (spec, service):
            self.counters.note(spec.base or spec.name, service.counters)
            yield Model(self.shown(spec), service, spec.adapter)

    async def _meant(self, name: str) -> str:
        """As `find`, for a request that is to be answered. Not for operators: a slip must not unload another model."""
        found, first = await self.find(name), self.pool.catalog.default
        if self._any_name and first is not None and resolve(found, [s.name for s in self.pool.catalog.specs()]) is None:
            return first.name
        return found

    async def find(self, name: str) -> str:
        """The pool's name for what a client calls a model; what it does not know itself it leaves to the pool."""
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
            # If there is none, the catalog knows what to say.
            return known[0].name if known else name
        return name

    def views(self) -> list[ModelView[ModelService]]:
        return self.pool.views()

    async def view(self, name: str) -> ModelView[ModelService]:
        """Raises UnknownModel if no model has the name. Loads nothing."""
        return self.pool.view_of(await self.pool.spec(await self.find(name)))

    def loaded(self) -> list[tuple[str, ModelService]]:
        """What has an engine, by its name in answers."""
        return [(self.shown(view.spec), view.service) for view in self.pool.touched() if view.service is not None]

    def totals(self) -> list[tuple[str, Counters]]:
        """What each model's engines have counted since the start, by its name in answers; also of what is unloaded."""
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
        """What answers call a model."""
        return self.names(spec)[0]

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """All that clients may call a model, and are told of."""
        first = self.pool.catalog.default
        if first is None or spec.name != first.name or not self.served_names:
            return (spec.name,)
        return self.served_names

    @property
    def only(self) -> ModelView[ModelService] | None:
        """The one model of a server that serves no other, but for adapters of it."""
        if not self.pool.catalog.is_fixed:
            return None
        whole = [spec for spec in self.pool.catalog.specs() if spec.base is None]
        return self.pool.view_of(whole[0]) if len(whole) == 1 else None

    @property
    def state(self) -> PoolState:
        """Of what must be there before requests are taken: the models that are loaded at the start.

        A server of many models is ready once all of those have come or failed, and stays so: that one of them is
        loaded again keeps nobody from the others. One of a single model is what that is.
        """
        if (only := self.only) is not None:
            return PoolState.LOADING if only.state in _COMING else only.state
        return PoolState.READY if self._begun else PoolState.LOADING

    async def _begin(self) -> None:
        await asyncio.gather(*map(self._come, self._first))
        self._begun = True
        for name in self._mentioned:
            try:
                await self.pool.spec(name)
            except UnknownModel as error:
                _log.warning("The settings name a model that does not exist. %s", error)
            except OstroError:
                # The place where it may be cannot be listed, which is told already.
                pass

    async def _come(self, name: str) -> None:
        """Waits until a model was loaded, or could not be."""
        with suppress(OstroError):
            while not await self._has_come(name):
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _has_come(self, name: str) -> bool:
        try:
            await self.pool.load(name)
        except Unavailable:
            # It takes longer than a request would wait, or there is no room for it.
            return self.pool.view_of(await self.pool.spec(name)).state not in _COMING
        return True

"""The models of this server as its endpoints see them: by whatever name a client calls one, and in use while it is.

Knows names and the pool; knows no HTTP and no engine.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ostro.errors import BadRequest
from ostro.pool.catalog import ModelSpec
from ostro.pool.pool import ModelPool, ModelView, PoolState
from ostro.server.service import ModelService

ANY = "default"
"""What a request that names no model asks for."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model, for the time of a request."""

    name: str
    """In answers."""
    service: ModelService
    adapter: str | None = None


class Models:
    def __init__(self, pool: ModelPool[ModelService], *, served_names: Sequence[str] = ()) -> None:
        """`served_names` are what clients may call the first model, the first of them in answers."""
        self.pool = pool
        self.served_names = tuple(served_names)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """The model, loaded if need be, and kept until the block is left."""
        async with self.pool.use(self.find(name)) as (spec, service):
            yield Model(self.shown(spec, service), service, spec.adapter)

    def find(self, name: str) -> str:
        """The pool's name for what a client calls a model; what it does not know itself it leaves to the pool."""
        first = self.pool.catalog.default
        if first is not None and name in (ANY, *self.served_names, self._own_name(first)):
            return first.name
        if name == ANY:
            known = self.pool.catalog.specs()
            if len(known) != 1:
                raise BadRequest(
                    "There are several models here, so the request must name one. GET /v1/models lists them.",
                    param="model",
                )
            return known[0].name
        return name

    def views(self) -> list[ModelView[ModelService]]:
        return self.pool.views()

    async def view(self, name: str) -> ModelView[ModelService]:
        """Raises ModelNotFound if no model has the name. Loads nothing."""
        spec = await self.pool.catalog.find(self.find(name))
        return next(view for view in self.views() if view.name == spec.name)

    def loaded(self) -> list[tuple[str, ModelService]]:
        """What has an engine, by its name in answers."""
        return [
            (self.shown(view.spec, view.service), view.service)
            for view in self.views()
            if view.service is not None and view.spec.base is None
        ]

    @property
    def first_name(self) -> str:
        first = self.pool.catalog.default
        return ANY if first is None else self.shown(first, None)

    @property
    def num_loads(self) -> int:
        return self.pool.counters.loads

    @property
    def num_evictions(self) -> int:
        return self.pool.counters.evictions

    def shown(self, spec: ModelSpec, service: ModelService | None) -> str:
        """What answers call a model."""
        if spec is not self.pool.catalog.default:
            return spec.name
        return self.served_names[0] if self.served_names else self._own_name(spec, service)

    @property
    def only(self) -> ModelView[ModelService] | None:
        """The one model of a server that serves no other."""
        return self.views()[0] if self.pool.catalog.is_fixed and len(self.pool.catalog.specs()) == 1 else None

    @property
    def state(self) -> PoolState:
        """Of what must be there before requests are taken: the models that are loaded at the start.

        A server of many models is ready when all of those have come or failed; one of a single model fails with it.
        """
        if (only := self.only) is not None:
            return only.state
        first = [view.state for view in self.views() if view.pinned or view.spec is self.pool.catalog.default]
        return PoolState.LOADING if PoolState.LOADING in first else PoolState.READY

    def _own_name(self, spec: ModelSpec, service: ModelService | None = None) -> str:
        """A model that nobody gave a name has the name that its files give it, once they are there."""
        if spec.named:
            return spec.name
        if service is None:
            service = next((view.service for view in self.views() if view.name == spec.name), None)
        return spec.name if service is None else service.name

"""POST /admin/{load,unload,pin,unpin}/{model}, POST /admin/profile, GET /admin/{stats,available}, GET
/admin/plan/{model}: for the server's operators.
"""

import asyncio
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.backends.plan import Plan
from ostro.devices import DEVICE_KINDS
from ostro.engine.profile import new_trace
from ostro.errors import NotAllowed
from ostro.pool.budget import PoolLimits
from ostro.pool.catalog import ModelSpec
from ostro.pool.pool import ModelView
from ostro.schemas.models import (
    CachedModel,
    Known,
    ModelOutlook,
    ModelStats,
    PlanFigures,
    ProfileRequest,
    ProfileResponse,
    ShortName,
    Stats,
)
from ostro.server.admission.limits import Usage
from ostro.server.api import Api, json_response
from ostro.server.api_docs.document import described
from ostro.server.models.service import ModelService
from ostro.sources.aliases import ALIASES
from ostro.sources.store import ModelStore


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["admin"], prefix="/admin")

    @routes.post("/load/{model:path}", **described(ModelStats, not_found=True))
    async def load(model: str) -> Response:
        """Loads a model and waits for it. Other models may be unloaded to make room."""
        spec = (await api.models.view(model)).spec
        await api.models.pool.load(spec.name)
        return _stats_response(api, spec)

    @routes.post("/unload/{model:path}", **described(ModelStats, not_found=True))
    async def unload(model: str) -> Response:
        """Unloads a model once its requests have ended. The next request for it loads it again."""
        spec = (await api.models.view(model)).spec
        await api.models.pool.unload(spec.name)
        return _stats_response(api, spec)

    @routes.post("/pin/{model:path}", **described(ModelStats, not_found=True))
    async def pin(model: str) -> Response:
        """Loads a model if necessary, and keeps it loaded whatever else is requested."""
        spec = (await api.models.view(model)).spec
        await api.models.pool.pin(spec.name, True)
        await api.models.pool.load(spec.name)
        return _stats_response(api, spec)

    @routes.post("/unpin/{model:path}", **described(ModelStats, not_found=True))
    async def unpin(model: str) -> Response:
        """Allows a model to be unloaded when others need its memory."""
        spec = (await api.models.view(model)).spec
        await api.models.pool.pin(spec.name, False)
        return _stats_response(api, spec)

    @routes.post("/profile", **described(ProfileResponse, request=ProfileRequest))
    async def profile(http: Request) -> Response:
        """Profiles a model's engine for a while, and returns the path of the trace. Needs `--profile DIR`."""
        request = await api.read(ProfileRequest, http)
        directory = api.options.profile_directory
        if directory is None:
            raise NotAllowed("Profiles need a directory. Start the server with --profile DIR.")
        spec = (await api.models.view(request.model)).spec
        async with api.models.pool.use(spec.name) as (spec, service):
            began = time.monotonic()
            name = api.models.shown(spec)
            path = new_trace(directory, name)
            recorded = await service.profile(path, seconds=request.seconds, max_steps=request.max_steps)
        seconds = time.monotonic() - began
        return json_response(ProfileResponse(model=name, path=str(path), steps=recorded.steps, seconds=seconds))

    @routes.get("/stats", **described(Stats))
    async def stats() -> Response:
        """All models with their memory, requests and counters."""
        pool = api.models.pool
        return json_response(
            Stats(
                models=[_stats(api, view) for view in api.models.views()],
                loads=pool.counters.loads,
                evictions=pool.counters.evictions,
                requests=api.gate.num_inside,
                waiting=api.gate.num_waiting,
                memory_budget=pool.limits.memory,
                device_memory_budget=pool.limits.device_memory,
                max_models=pool.limits.models,
            )
        )

    @routes.get("/available", **described(Known))
    async def available() -> Response:
        """Models that have a short name, and those in the cache of downloads. Loads and downloads nothing."""
        return json_response(await asyncio.to_thread(_known))

    @routes.get("/plan/{model:path}", **described(ModelOutlook, not_found=True))
    async def plan(model: str) -> Response:
        """The size of a model and what `ostro plan` says about it: of this server, or with a short name. Downloads no
        weights.
        """
        outlook = await api.models.outlook(model)
        return json_response(
            ModelOutlook(
                id=model,
                kind=outlook.kind,
                source=outlook.source,
                here=outlook.is_here,
                bytes=outlook.num_bytes,
                plan=None if outlook.plan is None else _figures(outlook.plan, api.models.pool.limits),
                unknown=outlook.unknown,
            )
        )

    return routes


def _known() -> Known:
    cached = sorted(ModelStore().entries(), key=lambda entry: entry.name)
    return Known(
        short_names=[
            ShortName(
                name=alias.name,
                description=alias.description,
                licence=alias.licence,
                sources=alias.sources,
                bytes=alias.num_bytes,
                here=alias.find(newest=False) is not None,
            )
            for alias in ALIASES.values()
        ],
        cached=[
            CachedModel(
                name=entry.name,
                source=entry.reference,
                bytes=entry.size,
                last_use=entry.last_use if entry.last_use > 0 else None,
                in_use=entry.in_use,
            )
            for entry in cached
        ],
    )


def _figures(plan: Plan, limits: PoolLimits) -> PlanFigures:
    """The plan within the budget of all models together."""
    budget = limits.device_memory if DEVICE_KINDS[plan.device].has_own_memory else limits.memory
    memory = plan.memory if budget is None else min(plan.memory, budget)
    return PlanFigures(
        fits=plan.fits and plan.total_bytes <= memory,
        device=plan.device,
        backend=plan.backend,
        precision=plan.precision,
        parameters=plan.parameters,
        memory=memory,
        total_bytes=plan.total_bytes,
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
        max_seq_len=plan.max_seq_len,
    )


def _stats_response(api: Api, spec: ModelSpec) -> Response:
    """The model's stats, even if its files are gone and it has just been removed."""
    return json_response(_stats(api, api.models.pool.view_of(spec)))


def _stats(api: Api, view: ModelView[ModelService]) -> ModelStats:
    name = api.models.shown(view.spec)
    heartbeat = None if view.service is None else view.service.heartbeat
    arrived = api.models.arrived(view.spec)
    used = api.gate.used.get(name, Usage())
    return ModelStats(
        id=name,
        state=view.state.value,
        pinned=view.pinned,
        parent=view.spec.base,
        bytes=view.bytes,
        device_bytes=view.device_bytes,
        requests=view.in_use,
        waiting=view.waiting,
        requests_total=used.requests,
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        generated_tokens=used.generated_tokens,
        loads=view.loads,
        evictions=view.evictions,
        load_seconds=view.load_seconds,
        fetched_bytes=None if arrived is None else arrived.num_bytes,
        fetch_bytes=None if arrived is None else arrived.total,
        idle_seconds=view.last_used,
        pages=None if heartbeat is None else heartbeat.pages_total,
        pages_free=None if heartbeat is None else heartbeat.pages_free,
        restarts=api.models.counters.totals(view.spec.base or view.name).restarts,
        failure=view.failure,
    )

"""GET /healthz, /readyz, /health and /version: for probes, load balancers and people. None of them blocks."""

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

from ostro.pool.pool import PoolState
from ostro.schemas.models import Alive, Health, Readiness, Version
from ostro.server.api import Api, json_response
from ostro.server.api_docs.document import described

_RETRY_SECONDS = "2"

_Reason = Literal["loading", "failed", "draining"]
_NOT_READY: dict[PoolState, _Reason] = {
    PoolState.FETCHING: "loading",
    PoolState.LOADING: "loading",
    PoolState.FAILED: "failed",
}


def router(api: Api, version: str) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", **described(Alive, unready=True))
    async def healthz() -> Response:
        """The process is up; with healthz_waits_for_model, the same as /readyz."""
        reason = _why_not_ready(api) if api.options.healthz_waits else None
        return _response(Alive(status=reason or "ok"), reason)

    @routes.get("/readyz", **described(Readiness, unready=True))
    async def readyz() -> Response:
        """The models to load at startup are loaded and warm, and requests are accepted."""
        reason = _why_not_ready(api)
        return _response(Readiness(status=reason or "ready"), reason)

    @routes.get("/health", **described(Health, unready=True))
    async def health() -> Response:
        """Whether requests are accepted, and basic facts. Reveals no model's name, because it needs no key."""
        reason = _why_not_ready(api)
        services = [view.service for view in api.models.pool.touched() if view.service is not None]
        infos = [service.info for service in services if service.info is not None]
        devices, backends = sorted({info.device for info in infos}), sorted({info.backend for info in infos})
        state = Health(
            status=reason or "ok",
            requests=sum(service.num_requests for service in services),
            restarts=sum(totals.restarts for _, totals in api.models.totals()),
            device=", ".join(devices) or None,
            devices=max((info.devices for info in infos), default=None),
            backend=", ".join(backends) or None,
            gpu=not {"cuda", "mps"}.isdisjoint(devices),
        )
        return _response(state, reason)

    @routes.get("/version", **described(Version))
    async def get_version() -> Response:
        return json_response(Version(version=version))

    return routes


def _why_not_ready(api: Api) -> _Reason | None:
    """Why requests are not accepted; None if they are."""
    return "draining" if api.gate.draining else _NOT_READY.get(api.models.state)


def _response(body: Alive | Readiness | Health, reason: _Reason | None) -> Response:
    response = json_response(body)
    if reason is not None:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        response.headers["retry-after"] = _RETRY_SECONDS
    return response

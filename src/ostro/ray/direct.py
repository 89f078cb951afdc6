"""The direct path: a replica with its own port, and the endpoint that names the replica for a request. Knows ASGI;
knows no Ray.

client ──HTTP──> HAProxy ──────────────────────────> replica's port ──> Ostro's whole HTTP application
                    └── the request's body ──> Picking
                                    <── replica
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ostro.errors import OstroError
from ostro.ray.broadcast import AllEngines, answer_of_all, concerns_all
from ostro.ray.forwarded_request import ForwardedRequest, read_key
from ostro.ray.ingress import caller_of, live, without_request_id
from ostro.ray.replica import ROUTER_HEADER, EngineReplica
from ostro.routing.key import Key
from ostro.server.admission.auth import Keyring
from ostro.server.admission.hosts import HostRule
from ostro.server.admission.ledger import Holding, Ledger
from ostro.server.error_handlers import error_response
from ostro.server.http.body import BodyLimits, read_body
from ostro.server.http.disconnect import ClientGone, UntilDisconnect

# Set by HAProxy if a body is longer than its buffer: it sends only what fits.
_TRUNCATED = "x-body-truncated"


class DirectReplica:
    """An ASGI application: answers for this replica, or for all of them where a request concerns them all."""

    def __init__(
        self,
        replica: EngineReplica,
        engines: AllEngines,
        keyring: Keyring,
        limits: BodyLimits,
        hosts: HostRule | None = None,
        num_places: int = 0,
    ) -> None:
        self._replica = replica
        self._engines = engines
        self._keyring = keyring
        self._limits = limits
        self._ledger = Ledger(limits.budget, num_keys=keyring.num_callers, num_places=num_places)
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            call = ForwardedRequest.of(scope)
            is_for_all = concerns_all(call.method, call.path)
            caller = caller_of(call, Headers(scope=scope), self._keyring, self._hosts) if is_for_all else None
            if caller is not None:
                await self._ask_all(caller, scope, receive, send)
            else:
                # Refusals are answered here too: they should cost the other replicas nothing.
                scope = {**scope, "path": call.path, "raw_path": call.raw_path, "root_path": ""}
                await self._replica.serve(scope, receive, without_request_id(call, send))

    async def _ask_all(self, caller: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Holding(self._ledger, caller, is_operator=self._keyring.is_operator(caller)) as holding:
                body = await read_body(Request(scope, receive), self._limits, holding)
                call = ForwardedRequest.of(scope, bytes(body))
                async with UntilDisconnect(receive):
                    response = await answer_of_all(self._engines, call)
        except ClientGone:
            return
        except OstroError as error:
            response = error_response(error, scope)
        await response(scope, receive, send)


class Picking:
    """An ASGI application for HAProxy: `POST /internal/route` with a request's body names the replica for it."""

    def __init__(self, pick: Callable[[Key], Awaitable[str | None]], router: str) -> None:
        """`router` goes with the request, so that replicas can tell each router which of its requests have ended."""
        self._pick = pick
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        http = Request(scope, receive)
        try:
            body = await http.body()
        except ClientDisconnect:
            return
        # HAProxy does not pass the path on, so a model named there is not known here.
        replica = await self._pick(await read_key("", body, is_whole=_TRUNCATED not in http.headers))
        response: Response
        if replica is None:
            response = PlainTextResponse("no replica", HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            headers = {ROUTER_HEADER.decode(): self._router}
            response = JSONResponse({"replica_id": replica, "request_headers": headers})
        await response(scope, receive, send)

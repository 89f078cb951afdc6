"""The one place where an exception becomes a status and an error body, in the request's dialect. Knows no endpoint."""

import re
from collections.abc import Mapping
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostro.errors import OstroError, TryLater, internal_error
from ostro.server.dialects.dialect import OLLAMA, OPENAI
from ostro.server.dialects.registry import dialect_of
from ostro.server.http.disconnect import ClientGone

# nginx's status for a client that disconnected. It is only logged.
_CLIENT_GONE = 499


async def refuse(error: OstroError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an error from a middleware, whose exceptions do not reach the handlers."""
    note_error(scope, error)
    await error_response(error, scope)(scope, receive, send)


def error_response(
    error: OstroError, scope: Scope | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """The error in the dialect of the request, or OpenAI's if `scope` is None."""
    headers = dict(headers or {})
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
        # A retry would fail again, and clients retry errors of this status twice.
        headers["x-should-retry"] = "false"
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if error.http_status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        # The rest of the body is still arriving, and will not be read.
        headers["connection"] = "close"
    dialect = OPENAI if scope is None else dialect_of(scope)
    record = None if scope is None else scope.get("state", {}).get("record")
    body = dialect.error_body(error, None if record is None else record.id)
    status = dialect.status(error.http_status)
    return Response(body.model_dump_json(), status, headers, media_type="application/json")


def install(app: Starlette) -> None:
    app.add_exception_handler(OstroError, _on_ostro_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(MemoryError, _on_memory_error)


class FaultBarrier:
    """ASGI middleware, innermost: sends a response for an unexpected exception, then re-raises it for the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            _note(scope, OstroError.openai_type)
            if not started:
                await error_response(internal_error(), scope)(scope, receive, send)
            raise


def note_error(scope: Scope, error: OstroError) -> None:
    """Records for the log which error ended the request, and which field caused it."""
    _note(scope, error.openai_code or error.openai_type, error.param)


def _note(scope: Scope, code: str | None, param: str | None = None) -> None:
    record = scope.get("state", {}).get("record")
    if record is not None:
        record.error, record.param = code, param


async def _on_ostro_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OstroError)
    note_error(request.scope, error)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Handles the router's own errors: an unknown path, or a method that the path does not support."""
    assert isinstance(error, HTTPException)
    # Not from `request.url`, in which the Host header could put another path, or none that can be parsed.
    path = request.scope["path"][:200]
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            message, code = f"There is no {path} here. {_cure(request)}", "not_found"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "another method")
            message, code = f"{path} does not support {request.method[:20]}. Use {allowed}.", "method_not_allowed"
        case _:
            message, code = f"{HTTPStatus(error.status_code).phrase}.", "bad_request"
    told = _RoutingError(message, error.status_code, code)
    note_error(request.scope, told)
    return error_response(told, request.scope, headers=error.headers)


class _RoutingError(OstroError):
    """The router's own error, as one of ours."""

    openai_type = "invalid_request_error"

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.http_status = status
        self.openai_code = code


def _cure(request: Request) -> str:
    if OLLAMA.claims(request.scope):
        return "This server does not speak Ollama's API. Set the client to OpenAI's, with a base URL that ends in /v1."
    meant = _similar_path(request)
    return "GET /docs lists the endpoints." if meant is None else f"Did you mean {meant}?"


def _similar_path(request: Request) -> str | None:
    """The path that was most likely meant: clients are often configured with a base URL without /v1, or with an extra
    slash.
    """
    given = request.scope["path"][:200]
    path = re.sub(r"/{2,}", "/", given).rstrip("/")
    path = re.sub(r"^(?:/v1)+(?=/v1/)", "", path)
    candidates = [each for each in (path, "/v1" + path) if each != given]
    return next((each for each in candidates if _is_served(request, each)), None)


def _is_served(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes)


async def _on_memory_error(request: Request, error: Exception) -> Response:
    """Answers 503: this request's memory has been freed again, and others continue."""
    told = TryLater("The server has too little memory for this request. Try again later, or ask for less.")
    note_error(request.scope, told)
    return error_response(told, request.scope)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    _note(request.scope, "client_gone")
    return Response(status_code=_CLIENT_GONE)

"""Errors in Anthropic's format. Knows paths and headers; knows no routes."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Scope

from ostro.errors import ContextLengthExceeded, OstroError
from ostro.schemas.messages import MessagesError, MessagesErrorDetail
from ostro.server.http.sse import typed_event

MESSAGES = "/v1/messages"
MODELS = "/v1/models"
_OVERLOADED = 529
_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def speaks_messages(scope: Scope) -> bool:
    """Whether a request uses Anthropic's API: by its path or, for paths that both APIs have, by its header."""
    path = scope["path"]
    if _is_below(path, MESSAGES):
        return True
    return _is_below(path, MODELS) and "anthropic-version" in Headers(scope=scope)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def status_of(status: int) -> int:
    return _OVERLOADED if status == HTTPStatus.SERVICE_UNAVAILABLE else status


def error_body(status: int, message: str, request_id: str | None) -> MessagesError:
    fallback = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    detail = MessagesErrorDetail(type=_TYPES.get(status_of(status), fallback), message=message)
    return MessagesError(error=detail, request_id=request_id)


def words_of(error: OstroError) -> str:
    if isinstance(error, ContextLengthExceeded) and error.prompt >= error.limit:
        # Agents look for this phrase, and then shorten the conversation.
        return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    return error.public


def error_event(error: OstroError, request_id: str | None) -> bytes:
    return typed_event("error", error_body(error.http_status, words_of(error), request_id).model_dump())

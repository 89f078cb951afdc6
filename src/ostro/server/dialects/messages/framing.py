"""The Messages API among the dialects: Anthropic's errors, request ids and lists of models."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from ostro.errors import ContextLengthExceeded, OstroError
from ostro.schemas.messages import MessagesError, MessagesErrorDetail, MessagesModel, MessagesModelList
from ostro.schemas.models import ModelCard
from ostro.server.dialects.dialect import MODELS_PATH, Dialect
from ostro.server.http.sse import typed_event

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


class MessagesDialect(Dialect):
    ping = typed_event("ping", {})
    done = b""
    error_schema = MessagesError
    id_headers = (b"x-request-id", b"request-id")

    def claims(self, scope: Scope) -> bool:
        """Models are listed for all dialects under one path; clients of this one have a header of their own."""
        if super().claims(scope):
            return True
        path: str = scope["path"]
        is_of_models = path == MODELS_PATH or path.startswith(MODELS_PATH + "/")
        return is_of_models and "anthropic-version" in Headers(scope=scope)

    def status(self, status: int) -> int:
        return _OVERLOADED if status == HTTPStatus.SERVICE_UNAVAILABLE else status

    def error_body(self, error: OstroError, request_id: str | None) -> MessagesError:
        status = self.status(error.http_status)
        fallback = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
        detail = MessagesErrorDetail(type=_TYPES.get(status, fallback), message=_message(error))
        return MessagesError(error=detail, request_id=request_id)

    def failed(self, error: OstroError, request_id: str | None = None) -> bytes:
        return typed_event("error", self.error_body(error, request_id).model_dump())

    def model(self, card: ModelCard) -> MessagesModel:
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        return MessagesModel(id=card.id, display_name=card.id, created_at=created, max_input_tokens=card.max_model_len)

    def model_list(self, cards: Sequence[ModelCard]) -> MessagesModelList:
        """All models on one page."""
        return MessagesModelList(
            data=[self.model(card) for card in cards],
            first_id=cards[0].id if cards else None,
            last_id=cards[-1].id if cards else None,
            has_more=False,
        )


def _message(error: OstroError) -> str:
    if isinstance(error, ContextLengthExceeded) and error.prompt >= error.limit:
        # Agents look for this phrase, and then shorten the conversation.
        return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    return error.public


DIALECT: Final = MessagesDialect("/v1/messages")

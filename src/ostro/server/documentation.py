"""The OpenAPI document: what each endpoint takes and gives. Knows schemas; knows no behaviour.

Bodies are read by `schemas.parse`, whose messages are ours, so FastAPI does not see their models: it is told here.
"""

from typing import Any, TypedDict

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode

from ostro import schemas
from ostro.schemas import ErrorBody, MessagesError, RequestModel, WireModel
from ostro.server.dialects.message_errors import status_of

# OpenAPI's objects, as FastAPI types them.
Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_SHARED_ERRORS = {
    401: "The API key is missing or unknown.",
    403: "The caller may not ask for this; the message says what would have to be set.",
    500: "The server met a fault.",
    503: "The model is loading, the server is draining or the engine is down; see Retry-After.",
}
_BODY_ERRORS = {
    400: "The request cannot be served as it is; the message says why.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not called JSON.",
    429: "Too much is waiting already; see Retry-After.",
    504: "The request took longer than it may.",
}


class RouteArguments(TypedDict):
    """Of a FastAPI route."""

    responses: dict[int | str, Json]
    openapi_extra: Json | None


def described(
    answer: type[WireModel],
    *,
    request: type[RequestModel] | None = None,
    events: type[WireModel] | None = None,
    event_words: str = "`data:` events, each a {name}, then `data: [DONE]`.",
    unready: bool = False,
    not_found: bool = False,
    refusable: bool = False,
    error: type[WireModel] = ErrorBody,
) -> RouteArguments:
    """For an endpoint that answers with `answer`, in a stream with `events`, and `unready` with a 503 of the same."""
    content: Json = {"application/json": {"schema": _reference(answer)}}
    if events is not None:
        content["text/event-stream"] = {"schema": {"description": event_words.format(name=events.__name__)}}
    errors = _SHARED_ERRORS | (_BODY_ERRORS if request is not None else {})
    if not_found:
        errors |= {404: "It does not exist."}
    if refusable:
        errors |= {400: _BODY_ERRORS[400]}
    if error is MessagesError:
        errors = {status_of(code): words for code, words in errors.items()}
    responses: dict[int | str, Json] = {200: {"description": "The answer.", "content": content}}
    for code, words in sorted(errors.items()):
        body = answer if unready and code == 503 else error
        responses[code] = {"description": words, "content": {"application/json": {"schema": _reference(body)}}}
    if request is None:
        return RouteArguments(responses=responses, openapi_extra=None)
    body_schema = {"application/json": {"schema": _reference(request)}}
    return RouteArguments(
        responses=responses, openapi_extra={"requestBody": {"required": True, "content": body_schema}}
    )


def document(app: FastAPI) -> Json:
    """The app's OpenAPI document, with every schema that its routes refer to. Made once."""
    if app.openapi_schema is None:
        whole = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operations in whole["paths"].values():
            for operation in operations.values():
                # FastAPI's own answer to parameters that it cannot read; ours is a 400 or a 404.
                operation["responses"].pop("422", None)
        whole["components"] = {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        # With a key or, where none is set, without.
        whole["security"] = [{"key": []}, {}]
        app.openapi_schema = whole
    return app.openapi_schema


def _schemas() -> Json:
    found: Json = {}
    for name in schemas.__all__:
        model = getattr(schemas, name)
        if isinstance(model, type) and issubclass(model, WireModel):
            mode: JsonSchemaMode = "validation" if issubclass(model, RequestModel) else "serialization"
            schema = model.model_json_schema(ref_template=_REFERENCE, mode=mode)
            found |= schema.pop("$defs", {})
            found[name] = schema
    return dict(sorted(found.items()))


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": _REFERENCE.format(model=model.__name__)}

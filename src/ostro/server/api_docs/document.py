"""The OpenAPI document: what each endpoint takes and returns. Knows schemas; knows no behaviour.

Bodies are parsed by `schemas.wire.parse`, which has our own error messages, so FastAPI does not see their models. They
are declared here.
"""

from typing import Any, TypedDict

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import JsonSchemaMode

from ostro.schemas.wire import RequestModel, WireModel
from ostro.server.dialects.dialect import OPENAI, Dialect

# OpenAPI's objects, as FastAPI types them.
Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"
_SHARED_ERRORS = {
    401: "The API key is missing or unknown.",
    403: "The caller may not ask for this; the message says what would have to be set.",
    500: "Internal error.",
    503: "The model is loading, the server is draining or the engine is down; see Retry-After.",
}
_BODY_ERRORS = {
    400: "The request is invalid; the message says why.",
    404: "There is no such model.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    429: "Too many requests are waiting; see Retry-After.",
    504: "The request exceeded its deadline.",
}


_described: dict[str, type[WireModel]] = {}
"""Every object that an endpoint takes, returns or streams, by name."""


class RouteArguments(TypedDict):
    """Keyword arguments for a FastAPI route."""

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
    dialect: Dialect = OPENAI,
) -> RouteArguments:
    """Describes an endpoint that responds with `answer`, streams `events`, and, if `unready`, sends `answer` with 503
    too.
    """
    content: Json = {"application/json": {"schema": _reference(answer)}}
    if events is not None:
        _described[events.__name__] = events
        content["text/event-stream"] = {"schema": {"description": event_words.format(name=events.__name__)}}
    errors = _SHARED_ERRORS | (_BODY_ERRORS if request is not None else {})
    if not_found:
        errors |= {404: "It does not exist."}
    if refusable:
        errors |= {400: _BODY_ERRORS[400]}
    errors = {dialect.status(code): words for code, words in errors.items()}
    responses: dict[int | str, Json] = {200: {"description": "The answer.", "content": content}}
    for code, words in sorted(errors.items()):
        body = answer if unready and code == 503 else dialect.error_schema
        responses[code] = {"description": words, "content": {"application/json": {"schema": _reference(body)}}}
    if request is None:
        return RouteArguments(responses=responses, openapi_extra=None)
    body_schema = {"application/json": {"schema": _reference(request)}}
    return RouteArguments(
        responses=responses, openapi_extra={"requestBody": {"required": True, "content": body_schema}}
    )


def document(app: FastAPI) -> Json:
    """The app's OpenAPI document, with the schemas that endpoints refer to. Built once."""
    if app.openapi_schema is None:
        whole = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for operations in whole["paths"].values():
            for operation in operations.values():
                # FastAPI's own response to invalid parameters; ours is a 400 or a 404.
                operation["responses"].pop("422", None)
        whole["components"] = {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        # With a key, or without one if the server has none.
        whole["security"] = [{"key": []}, {}]
        app.openapi_schema = whole
    return app.openapi_schema


def _schemas() -> Json:
    found: Json = {}
    for name, model in _described.items():
        mode: JsonSchemaMode = "validation" if issubclass(model, RequestModel) else "serialization"
        schema = model.model_json_schema(ref_template=_REFERENCE, mode=mode)
        found |= schema.pop("$defs", {})
        found[name] = schema
    return dict(sorted(found.items()))


def _reference(model: type[WireModel]) -> Json:
    _described[model.__name__] = model
    return {"$ref": _REFERENCE.format(model=model.__name__)}

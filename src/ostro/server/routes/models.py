"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter
from starlette.responses import Response

from ostro.server.api import Api, json_response
from ostro.server.documentation import described
from ostro.server.schemas import ModelCard, ModelList


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models", **described(ModelList))
    async def list_models() -> Response:
        """What is served here, also while it loads."""
        return json_response(ModelList(data=[_card(api)]))

    # An id may have slashes.
    @routes.get("/v1/models/{id:path}", **described(ModelCard, not_found=True))
    async def retrieve_model(id: str) -> Response:
        """One model of the list."""
        api.check_model(id)
        return json_response(_card(api))

    return routes


def _card(api: Api) -> ModelCard:
    info = api.service.info
    return ModelCard(
        id=api.model,
        created=api.started,
        owned_by="ostro",
        permission=[],
        root=api.service.name,
        parent=None,
        max_model_len=None if info is None else info.max_len,
    )

"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.pool.pool import ModelView
from ostro.sampling_defaults import SamplingDefaults
from ostro.schemas.models import ModelCard, ModelList
from ostro.server.api import Api, json_response
from ostro.server.api_docs.document import described
from ostro.server.dialects.dialect import MODELS_PATH
from ostro.server.dialects.registry import dialect_of
from ostro.server.models.service import ModelService

# A root that takes longer to list is shown as last known. The first listing gets more time: nothing is known yet.
_LOOK_SECONDS, _FIRST_LOOK_SECONDS = 1.0, 5.0


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["models"])

    @routes.get(MODELS_PATH, **described(ModelList))
    async def list_models(http: Request) -> Response:
        """All models: loaded, loading, or to be loaded on request. With the header `anthropic-version`, in Anthropic's
        format.
        """
        catalog = api.models.pool.catalog
        await catalog.refresh_if_old(wait_seconds=_LOOK_SECONDS if catalog.specs() else _FIRST_LOOK_SECONDS)
        cards = [
            _card(api, view, name, None if view.service is None else view.service.sampling_defaults)
            for view in api.models.views()
            for name in api.models.names(view.spec)
        ]
        return json_response(dialect_of(http.scope).model_list(cards))

    # An id may contain slashes.
    @routes.get(MODELS_PATH + "/{id:path}", **described(ModelCard, not_found=True))
    async def retrieve_model(http: Request, id: str) -> Response:
        """One model of the list."""
        view = await api.models.view(id)
        names = api.models.names(view.spec)
        card = _card(api, view, id if id in names else names[0], await api.models.recommended(view))
        return json_response(dialect_of(http.scope).model(card))

    return routes


def _card(api: Api, view: ModelView[ModelService], name: str, own: SamplingDefaults | None) -> ModelCard:
    """`own` is the sampling that the model recommends, as far as it is known."""
    info = None if view.service is None else view.service.info
    # The sampling defaults of a request that sets none.
    silent = None if own is None else api.options.defaults.over(own).capped(api.gate.limits.new_tokens)
    return ModelCard(
        id=name,
        created=api.started,
        owned_by="ostro",
        permission=[],
        root=view.spec.base or view.spec.name,
        parent=view.spec.base,
        max_model_len=None if info is None else info.max_len,
        backend=None if info is None else info.backend,
        precision=None if info is None else info.precision,
        sampling_defaults=None if silent is None else silent.given,
        state=view.state.value,
    )

"""GET /v1/models and /v1/models/{id}."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.pool.pool import ModelView
from ostro.schemas import MessagesModel, MessagesModelList, ModelCard, ModelList
from ostro.server.api import Api, json_response
from ostro.server.api_docs.document import described
from ostro.server.dialects.messages.framing import speaks_messages
from ostro.server.models.service import ModelService

# If listing a root takes longer, its last known models are shown. The first listing gets more time: none are known yet.
_LOOK_SECONDS, _FIRST_LOOK_SECONDS = 1.0, 5.0


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models", **described(ModelList))
    async def list_models(http: Request) -> Response:
        """All models: loaded, loading, or to be loaded on request. With the header `anthropic-version`, in Anthropic's
        format.
        """
        catalog = api.models.pool.catalog
        await catalog.refresh_if_old(wait_seconds=_LOOK_SECONDS if catalog.specs() else _FIRST_LOOK_SECONDS)
        cards = [_card(api, view, name) for view in api.models.views() for name in api.models.names(view.spec)]
        if speaks_messages(http.scope):
            return json_response(_messages_list(cards))
        return json_response(ModelList(data=cards))

    # An id may contain slashes.
    @routes.get("/v1/models/{id:path}", **described(ModelCard, not_found=True))
    async def retrieve_model(http: Request, id: str) -> Response:
        """One model of the list."""
        view = await api.models.view(id)
        names = api.models.names(view.spec)
        card = _card(api, view, id if id in names else names[0])
        return json_response(_messages_model(card) if speaks_messages(http.scope) else card)

    return routes


def _messages_list(cards: list[ModelCard]) -> MessagesModelList:
    """All models on one page."""
    return MessagesModelList(
        data=[_messages_model(card) for card in cards],
        first_id=cards[0].id if cards else None,
        last_id=cards[-1].id if cards else None,
        has_more=False,
    )


def _messages_model(card: ModelCard) -> MessagesModel:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return MessagesModel(id=card.id, display_name=card.id, created_at=created, max_input_tokens=card.max_model_len)


def _card(api: Api, view: ModelView[ModelService], name: str) -> ModelCard:
    info = None if view.service is None else view.service.info
    own = None if view.service is None else view.service.sampling_defaults
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

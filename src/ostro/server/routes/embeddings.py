"""POST /v1/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.outputs import Completion
from ostro.server.api import Api, record_of
from ostro.server.body import read_request
from ostro.server.documentation import described
from ostro.server.generation import Answer, Job, each_in_turn
from ostro.server.responses import embedding_response, finish_reason
from ostro.server.schemas import EmbeddingRequest, EmbeddingResponse, WireModel


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["embed"])

    @routes.post("/v1/embeddings", **described(EmbeddingResponse, request=EmbeddingRequest))
    async def create_embedding(http: Request) -> Response:
        """A vector for each text, from a model that was made for it."""
        request = await read_request(EmbeddingRequest, http, api.options.body)
        record_of(http).model = api.model
        return Answer(api, http, _job(api, request))

    return routes


def _job(api: Api, request: EmbeddingRequest) -> Job:
    api.check_model(request.model)

    async def prepare() -> list[EngineRequest]:
        return await each_in_turn(api.service.prepare_embedding, request.input)

    def respond(completions: list[Completion]) -> WireModel:
        for completion in completions:
            finish_reason(completion.choices[0])
        return embedding_response(
            request,
            [completion.embedding or [] for completion in completions],
            num_tokens=sum(len(completion.prompt_ids) for completion in completions),
            model=api.model,
        )

    return Job(prepare, respond)

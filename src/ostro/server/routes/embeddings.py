"""POST /v1/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.frontend.outputs import Completion
from ostro.schemas.embeddings import EmbeddingRequest, EmbeddingResponse
from ostro.schemas.wire import WireModel
from ostro.server.api import Api
from ostro.server.api_docs.document import described
from ostro.server.dialects.openai import finish_reason
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["embed"])

    @routes.post("/v1/embeddings", **described(EmbeddingResponse, request=EmbeddingRequest))
    async def create_embedding(http: Request) -> Response:
        """A vector for each text, from an embedding model."""
        request = await api.read(EmbeddingRequest, http)
        return Answer(api, http, _job(request))

    return routes


def _job(request: EmbeddingRequest) -> Job:
    async def prepare(model: Model) -> list[EngineRequest]:
        return await model.service.prepare_embeddings(
            request.input,
            adapter=model.adapter,
            prompt_name=request.prompt_name,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        for completion in completions:
            finish_reason(completion.choices[0])
        vectors = [completion.embedding or [] for completion in completions]
        if (pooling := model.service.pooling) is not None:
            vectors = [pooling.shortened(vector, request.dimensions) for vector in vectors]
        return EmbeddingResponse.of(
            request,
            vectors,
            num_tokens=sum(len(completion.prompt_ids) for completion in completions),
            model=model.name,
        )

    return Job(request.model, prepare, respond)

"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.frontend.outputs import Completion
from ostro.schemas.completions import CompletionChunk, CompletionRequest, CompletionResponse
from ostro.server.api import Api, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.completions.framing import DIALECT
from ostro.server.dialects.completions.request import prepared
from ostro.server.dialects.completions.writer import CompletionWriter
from ostro.server.dialects.openai import check_streamable
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["generate"])

    @routes.post(DIALECT.path, **described(CompletionResponse, request=CompletionRequest, events=CompletionChunk))
    async def create_completion(http: Request) -> Response:
        """Continuations of one or several prompts."""
        return await _answer(api, http)

    @routes.post("/v1/{model:path}/completions", include_in_schema=False)
    async def create_completion_of(http: Request, model: str) -> Response:
        """The same, for the model named in the path."""
        return await _answer(api, http, model)

    return routes


async def _answer(api: Api, http: Request, model: str | None = None) -> Response:
    request = await api.read(CompletionRequest, http)
    record_of(http).stream = request.stream
    return Answer(api, http, _job(api, request, model or request.model))


def _job(api: Api, request: CompletionRequest, name: str) -> Job:
    params, strict = api.options.params(request), api.options.openai_strict
    check_streamable(request)

    async def prepare(model: Model) -> list[EngineRequest]:
        return await prepared(request, params, model)

    def writer(model: Model, completions: list[Completion]) -> CompletionWriter:
        return CompletionWriter(request, completions, model.service.tokenizer, model=model.name, strict=strict)

    return Job.written(name, prepare, writer, streams=request.stream)

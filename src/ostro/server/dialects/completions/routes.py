"""POST /v1/completions."""

from contextlib import nullcontext

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.errors import BadRequest
from ostro.frontend.outputs import Completion
from ostro.schemas import CompletionChunk, CompletionRequest, CompletionResponse, WireModel
from ostro.server.api import Api, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.chat.writer import CompletionChunks
from ostro.server.dialects.openai import completion_response
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/completions", **described(CompletionResponse, request=CompletionRequest, events=CompletionChunk))
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
    source = request.format_source
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs has no place in a stream: leave one of them out.", param="prompt_logprobs")

    async def prepare(model: Model) -> list[EngineRequest]:
        with nullcontext() if source is None else source.named_in_errors():
            return await model.service.prepare_all(
                request.prompt, params, cache_salt=request.cache_salt, priority=request.priority, adapter=model.adapter
            )

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        return completion_response(request, completions, model.service.tokenizer, model=model.name, strict=strict)

    def chunks(model: Model, completions: list[Completion]) -> CompletionChunks:
        return CompletionChunks(request, completions, model.service.tokenizer, model=model.name, strict=strict)

    return Job(name, prepare, respond, chunks if request.stream else None)

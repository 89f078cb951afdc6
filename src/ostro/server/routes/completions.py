"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.errors import BadRequest
from ostro.outputs import Completion
from ostro.server.api import Api, record_of
from ostro.server.body import read_request
from ostro.server.chunks import CompletionChunks
from ostro.server.documentation import described
from ostro.server.generation import Answer, Job, Prompt, each_in_turn
from ostro.server.responses import completion_response
from ostro.server.schemas import CompletionChunk, CompletionRequest, CompletionResponse, WireModel


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["generate"])

    @routes.post("/v1/completions", **described(CompletionResponse, request=CompletionRequest, events=CompletionChunk))
    async def create_completion(http: Request) -> Response:
        """Continuations of one or several prompts."""
        request = await read_request(CompletionRequest, http, api.options.body)
        record = record_of(http)
        record.model, record.stream = api.model, request.stream
        return Answer(api, http, _job(api, request))

    return routes


def _job(api: Api, request: CompletionRequest) -> Job:
    api.check_model(request.model)
    params = request.sampling_params()
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs has no place in a stream: leave one of them out.", param="prompt_logprobs")

    async def prepare_one(prompt: Prompt) -> EngineRequest:
        return await api.service.prepare(prompt, params, cache_salt=request.cache_salt, priority=request.priority)

    async def prepare() -> list[EngineRequest]:
        return await each_in_turn(prepare_one, request.prompt)

    def respond(completions: list[Completion]) -> WireModel:
        return completion_response(request, completions, api.service.tokenizer, model=api.model)

    def chunks(completions: list[Completion]) -> CompletionChunks:
        return CompletionChunks(request, completions, api.service.tokenizer, model=api.model)

    return Job(prepare, respond, chunks if request.stream else None)

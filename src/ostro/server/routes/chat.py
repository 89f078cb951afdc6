"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.errors import BadRequest
from ostro.outputs import Completion
from ostro.server.api import Api, record_of
from ostro.server.body import read_request
from ostro.server.chunks import ChatChunks
from ostro.server.documentation import described
from ostro.server.generation import Answer, Job
from ostro.server.responses import chat_response
from ostro.server.schemas import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse, WireModel


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["generate"])

    @routes.post(
        "/v1/chat/completions",
        **described(ChatCompletionResponse, request=ChatCompletionRequest, events=ChatCompletionChunk),
    )
    async def create_chat_completion(http: Request) -> Response:
        """The next message of a conversation."""
        request = await read_request(ChatCompletionRequest, http, api.options.body)
        record = record_of(http)
        record.model, record.stream = api.model, request.stream
        return Answer(api, http, _job(api, request))

    return routes


def _job(api: Api, request: ChatCompletionRequest) -> Job:
    api.check_model(request.model)
    params = request.sampling_params()
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs has no place in a stream: leave one of them out.", param="prompt_logprobs")

    async def prepare() -> list[EngineRequest]:
        messages = request.template_messages()
        return [
            await api.service.prepare_chat(messages, params, cache_salt=request.cache_salt, priority=request.priority)
        ]

    def respond(completions: list[Completion]) -> WireModel:
        return chat_response(request, completions[0], api.service.tokenizer, model=api.model)

    def chunks(completions: list[Completion]) -> ChatChunks:
        return ChatChunks(request, completions[0], api.service.tokenizer, model=api.model)

    return Job(prepare, respond, chunks if request.stream else None)

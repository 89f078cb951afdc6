"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.errors import BadRequest
from ostro.frontend.outputs import Completion
from ostro.schemas import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse, WireModel
from ostro.server.api import Api, record_of, template_messages
from ostro.server.api_docs.document import described
from ostro.server.dialects.chat.request import chat_request
from ostro.server.dialects.chat.writer import AnswerChunks, ChatChunks, Chunks
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.chat_turn import ChatTurn
from ostro.server.dialects.openai import chat_response
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["generate"])

    @routes.post(
        "/v1/chat/completions",
        **described(ChatCompletionResponse, request=ChatCompletionRequest, events=ChatCompletionChunk),
    )
    async def create_chat_completion(http: Request) -> Response:
        """The next message of a conversation."""
        return await _answer(api, http)

    @routes.post("/v1/{model:path}/chat/completions", include_in_schema=False)
    async def create_chat_completion_of(http: Request, model: str) -> Response:
        """The same, for the model named in the path."""
        return await _answer(api, http, model)

    return routes


async def _answer(api: Api, http: Request, model: str | None = None) -> Response:
    request = await api.read(ChatCompletionRequest, http)
    record_of(http).stream = request.stream
    return Answer(api, http, _job(api, request, ChatTurn(await _chat_request(api, request)), model or request.model))


async def _chat_request(api: Api, request: ChatCompletionRequest) -> ChatRequest:
    params = api.options.params(request)
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs has no place in a stream: leave one of them out.", param="prompt_logprobs")
    return chat_request(request, await template_messages(request.messages), params)


def _job(api: Api, request: ChatCompletionRequest, turn: ChatTurn, name: str) -> Job:
    strict = api.options.openai_strict

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        [completion], tokenizer = completions, model.service.tokenizer
        return chat_response(request, completion, turn.stream(completion), tokenizer, model=model.name, strict=strict)

    def chunks(model: Model, completions: list[Completion]) -> Chunks:
        [completion], tokenizer = completions, model.service.tokenizer
        if turn.is_plain:
            return ChatChunks(request, completion, tokenizer, model=model.name, strict=strict)
        return AnswerChunks(request, completion, turn.stream(completion), tokenizer, model=model.name, strict=strict)

    return Job(name, turn.prepare, respond, chunks if request.stream else None)

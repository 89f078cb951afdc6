"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.frontend.outputs import Completion
from ostro.schemas.chat import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse
from ostro.server.api import Api, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.chat.framing import DIALECT
from ostro.server.dialects.chat.request import chat_request
from ostro.server.dialects.chat.writer import ChatWriter, chat_writer
from ostro.server.dialects.chat_turn import ChatTurn, CompleteTurn
from ostro.server.dialects.openai import check_streamable
from ostro.server.generation import Answer, Job
from ostro.server.http.body import holding_of
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["generate"])

    @routes.post(
        DIALECT.path,
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
    check_streamable(request)
    params = api.options.params(request)
    turn = CompleteTurn(lambda: chat_request(request, params), is_long=holding_of(http).is_long)
    return Answer(api, http, _job(api, request, turn, model or request.model))


def _job(api: Api, request: ChatCompletionRequest, turn: ChatTurn, name: str) -> Job:
    def writer(model: Model, completions: list[Completion]) -> ChatWriter:
        [completion] = completions
        return chat_writer(
            request,
            turn.reader(completion),
            model.service.tokenizer,
            model=model.name,
            strict=api.options.openai_strict,
        )

    return Job.written(name, turn.prepare, writer, streams=request.stream)

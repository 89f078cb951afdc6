"""/v1/messages: Anthropic's Messages API."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.frontend.outputs import Completion
from ostro.sampling_params import SamplingParams
from ostro.schemas.messages import (
    AssistantMessage,
    CountMessageTokens,
    CreateMessage,
    MessageEvent,
    MessagesInput,
    MessageTokens,
)
from ostro.server.api import Api, json_response, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.chat_turn import ChatTurn, CompleteTurn, SingleChoiceReader
from ostro.server.dialects.messages.framing import DIALECT
from ostro.server.dialects.messages.request import chat_request
from ostro.server.dialects.messages.writer import MessageAnswerWriter
from ostro.server.generation import Answer, Job, num_prompt_tokens
from ostro.server.http.body import holding_of
from ostro.server.models.served import Model

_EVENTS = "`event:` and `data:` lines, with a {name} as data; the last is message_stop or error."


def router(api: Api) -> APIRouter:
    routes = APIRouter(prefix=DIALECT.path, tags=["messages"])

    @routes.post(
        "",
        **described(AssistantMessage, request=CreateMessage, events=MessageEvent, event_words=_EVENTS, dialect=DIALECT),
    )
    async def create_message(http: Request) -> Response:
        """The next message of a conversation, in Anthropic's dialect."""
        request = await api.read(CreateMessage, http)
        record_of(http).stream = request.stream
        return Answer(api, http, _job(api, http, request))

    @routes.post("/count_tokens", **described(MessageTokens, request=CountMessageTokens, dialect=DIALECT))
    async def count_message_tokens(http: Request) -> Response:
        """The number of tokens in a conversation."""
        request = await api.read(CountMessageTokens, http)
        turn = _turn(http, request, SamplingParams())
        return json_response(MessageTokens(input_tokens=await num_prompt_tokens(api, http, request.model, turn)))

    return routes


def _job(api: Api, http: Request, request: CreateMessage) -> Job:
    turn, request_id = _turn(http, request, _params(api, request)), record_of(http).id

    def writer(model: Model, completions: list[Completion]) -> MessageAnswerWriter:
        [completion] = completions
        reader = SingleChoiceReader(turn.reader(completion), model)
        return MessageAnswerWriter(reader, model=model.name, request_id=request_id)

    return Job.written(request.model, turn.prepare, writer, streams=request.stream)


def _turn(http: Request, request: MessagesInput, params: SamplingParams) -> ChatTurn:
    return CompleteTurn(lambda: chat_request(request, params), is_long=holding_of(http).is_long)


def _params(api: Api, request: CreateMessage) -> SamplingParams:
    params, cap = api.options.params(request), api.gate.limits.new_tokens
    # Clients must set a limit and often set a huge one. It is lowered to the cap, as it is to the context.
    if cap is None or params.max_tokens is None or params.max_tokens <= cap:
        return params
    return params.with_changes(max_tokens=cap)

"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.schemas.tokenizer import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from ostro.server.api import Api, json_response, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.chat.request import tool_of
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.models.served import ANY
from ostro.server.models.service import ModelService
from ostro.text.tokenizer import Tokenizer


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["tokenizer"])

    @routes.post("/tokenize", **described(TokenizeResponse, request=TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        """The token ids of a text or a conversation, as the model would get them."""
        request = await api.read(TokenizeRequest, http)
        return await _with_model(api, http, request.model, partial(_tokenized, request))

    @routes.post("/detokenize", **described(DetokenizeResponse, request=DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        """The text of token ids, including special tokens."""
        request = await api.read(DetokenizeRequest, http)
        return await _with_model(api, http, request.model, partial(_detokenized, request))

    @routes.get("/tokenizer_info", **described(TokenizerInfo, not_found=True))
    async def tokenizer_info(http: Request, model: str = ANY) -> Response:
        """What a client needs to know to tokenise as the server does."""
        return await _with_model(api, http, model, _described)

    return routes


async def _with_model(
    api: Api, http: Request, name: str, answer: Callable[[ModelService], Awaitable[Response]]
) -> Response:
    """Passes the admission gate, and answers with the model in use."""
    async with api.gate.admit(record_of(http)) as ticket:
        model = await ticket.take(api.models.use(name, ticket.record.key), name)
        return await ticket.prepare(partial(answer, model.service))


async def _tokenized(request: TokenizeRequest, service: ModelService) -> Response:
    tokenizer, max_len = service.tokenizer, None if service.info is None else service.info.max_len
    chat = None
    if request.messages is not None:
        messages = request.messages

        def convert() -> list[dict[str, object]]:
            return [message.for_template() for message in messages]

        asked = ChatRequest(
            messages=await service.run_off_loop(convert),
            params=SamplingParams(),
            tools=tuple(map(tool_of, request.tools)),
            template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        chat = await service.render_chat(asked)
    else:
        service.check_text(request.prompt or "", "prompt")

    def respond() -> Response:
        if chat is not None:
            ids = tokenizer.encode_rendered(chat)
        else:
            ids = tokenizer.encode(request.prompt or "", add_special=request.add_special_tokens)
        strings = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
        return json_response(TokenizeResponse(count=len(ids), max_model_len=max_len, tokens=ids, token_strs=strings))

    return await service.run_off_loop(respond)


async def _detokenized(request: DetokenizeRequest, service: ModelService) -> Response:
    tokenizer, ids = service.tokenizer, request.tokens
    if ids and max(ids) >= tokenizer.vocab_size:
        bad = next(token for token in ids if token >= tokenizer.vocab_size)
        raise BadRequest(
            f"tokens holds token id {bad}, but the vocabulary ends at {tokenizer.vocab_size - 1}.", param="tokens"
        )
    return await service.run_off_loop(
        lambda: json_response(DetokenizeResponse(prompt=tokenizer.decode(ids, skip_special=False)))
    )


async def _described(service: ModelService) -> Response:
    return json_response(_info(service.tokenizer))


def _info(tokenizer: Tokenizer) -> TokenizerInfo:
    eos_id, bos_id = min(tokenizer.eos_ids, default=None), tokenizer.bos_id
    return TokenizerInfo(
        eos_token=None if eos_id is None else tokenizer.token_text(eos_id),
        eos_token_id=eos_id,
        eos_token_ids=sorted(tokenizer.eos_ids),
        bos_token=None if bos_id is None else tokenizer.token_text(bos_id),
        bos_token_id=bos_id,
        vocab_size=tokenizer.vocab_size,
        chat_template=None if tokenizer.chat_template is None else tokenizer.chat_template.source,
    )

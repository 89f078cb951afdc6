"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

import asyncio
from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.server.api import Api, json_response, record_of
from ostro.server.body import read_request
from ostro.server.documentation import described
from ostro.server.models import ANY
from ostro.server.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from ostro.server.service import ModelService
from ostro.text.tokenizer import Tokenizer


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["tokenizer"])

    @routes.post("/tokenize", **described(TokenizeResponse, request=TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        """The token ids of a text or a conversation, as the model would get them."""
        request = await read_request(TokenizeRequest, http, api.options.body)
        return await _with_model(api, http, request.model, lambda service: _tokenized(service, request))

    @routes.post("/detokenize", **described(DetokenizeResponse, request=DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        """The text of token ids, special ones too."""
        request = await read_request(DetokenizeRequest, http, api.options.body)
        return await _with_model(api, http, request.model, lambda service: _detokenized(service.tokenizer, request))

    @routes.get("/tokenizer_info", **described(TokenizerInfo, not_found=True))
    async def tokenizer_info(http: Request, model: str = ANY) -> Response:
        """What a client must know to count and cut tokens as the server does."""
        return await _with_model(api, http, model, lambda service: json_response(_info(service.tokenizer)))

    return routes


async def _with_model(api: Api, http: Request, name: str, answer: Callable[[ModelService], Response]) -> Response:
    """In a thread, with the writing of the answer, which is as long as the text; as one of those that the gate lets
    in.
    """
    async with api.gate.admit(record_of(http)) as ticket:
        model = await ticket.take(api.models.use(name), name)
        return await ticket.within(asyncio.to_thread(answer, model.service))


def _tokenized(service: ModelService, request: TokenizeRequest) -> Response:
    tokenizer, max_len = service.tokenizer, None if service.info is None else service.info.max_len
    ids = _encode(tokenizer, request)
    strings = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    return json_response(TokenizeResponse(count=len(ids), max_model_len=max_len, tokens=ids, token_strs=strings))


def _detokenized(tokenizer: Tokenizer, request: DetokenizeRequest) -> Response:
    return json_response(DetokenizeResponse(prompt=tokenizer.decode(request.tokens, skip_special=False)))


def _encode(tokenizer: Tokenizer, request: TokenizeRequest) -> list[int]:
    if request.messages is None:
        return tokenizer.encode(request.prompt or "", add_special=request.add_special_tokens)
    messages = [message.for_template() for message in request.messages]
    return tokenizer.encode_chat(messages, add_generation_prompt=request.add_generation_prompt)


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

"""Counts a conversation's tokens, for the endpoints that only count."""

from starlette.requests import Request

from ostro.server.api import Api, record_of
from ostro.server.dialects.chat_request import ChatRequest


async def num_prompt_tokens(api: Api, http: Request, name: str, chat: ChatRequest) -> int:
    """The number of tokens in the prompt that the model would get. Passes the admission gate."""
    async with api.gate.admit(record_of(http)) as ticket:
        model = await ticket.take(api.models.use(name), name)
        service = model.service

        async def count() -> int:
            rendered = await service.render_chat(chat)
            return await service.run_off_loop(lambda: len(service.tokenizer.encode_rendered(rendered)))

        return await ticket.prepare(count)

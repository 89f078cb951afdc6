"""Prepares a response's conversation, dropping its beginning if it is too long. Knows messages; no wire format."""

from collections.abc import Sequence
from dataclasses import replace

from ostro.engine.request import Request
from ostro.errors import BadRequest, ContextLengthExceeded
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.chat_turn import ChatTurn
from ostro.server.dialects.responses.request import OfferedTools
from ostro.server.models.served import Model
from ostro.text.chat import Message


class ResponseTurn(ChatTurn):
    def __init__(self, request: ChatRequest, tools: OfferedTools, *, truncates: bool) -> None:
        """`truncates`: whether the conversation's first turns are dropped if it is too long."""
        super().__init__(request)
        self._tools = tools
        self._truncates = truncates

    async def prepare(self, model: Model) -> list[Request]:
        try:
            return await self._fitting(model) if self._truncates else await super().prepare(model)
        except BadRequest as error:
            # Its name in this dialect.
            error.param = "input" if error.param == "messages" else self._tools.named(error.param)
            raise

    async def _fitting(self, model: Model) -> list[Request]:
        """Drops as few turns as possible. Raises ContextLengthExceeded if the last turn alone is too long."""
        whole = self.request.messages
        shorter = _shorter(whole)
        low, high = 0, len(shorter) - 1
        # Binary search: if a conversation fits, so do all shorter ones.
        while low < high:
            middle = (low + high) // 2
            if await self._fits(model, shorter[middle]):
                high = middle
            else:
                low = middle + 1
        self.request = replace(self.request, messages=shorter[low])
        return await super().prepare(model)

    async def _fits(self, model: Model, messages: list[Message]) -> bool:
        self.request = replace(self.request, messages=messages)
        try:
            await super().prepare(model)
        except ContextLengthExceeded:
            return False
        return True


def _shorter(messages: Sequence[Message]) -> list[list[Message]]:
    """The whole conversation, then ever shorter ones, each beginning at a later user message. System messages at the
    beginning are always kept.
    """
    begin = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system, rest = list(messages[:begin]), list(messages[begin:])
    starts = [0, *(at for at, message in enumerate(rest) if at and message["role"] == "user")]
    return [system + rest[at:] for at in starts]

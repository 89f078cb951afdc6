"""Resolves what a request to /v1/responses refers to: the response it continues, and items of stored responses;
and shortens a conversation that is too long, if asked to.

Knows the store and items; knows no HTTP.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from ostro.engine.request import Request
from ostro.errors import BadRequest, ContextLengthExceeded
from ostro.sampling_params import SamplingParams
from ostro.schemas.responses import InputItem, ItemReference, ResponseInput
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.chat_turn import ChatTurn
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.responses.request import OfferedTools, chat_request, conversation, offered_tools
from ostro.server.dialects.responses.store import Exchange, ResponseStore
from ostro.server.dialects.writing import new_id
from ostro.server.models.served import Model
from ostro.text.chat import Message

# Translating less than this takes less time than waking a thread.
_MANY_ITEMS = 64
_MANY_BYTES = 64 << 10

_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_", "reasoning": "rs_"}


@dataclass(frozen=True, slots=True)
class Translated:
    """A request with everything it refers to."""

    chat: ChatRequest
    tools: OfferedTools
    own_items: list[Json]
    """The request's own input, each item with an id."""
    previous: Exchange | None


async def translated(request: ResponseInput, params: SamplingParams, store: ResponseStore, owner: str) -> Translated:
    """Raises BadRequest if it refers to something that is not stored for `owner`, the caller's key."""
    previous_id = request.previous_response_id
    previous = None if previous_id is None else store.previous(owner, previous_id)

    def translate() -> Translated:
        history = [] if previous is None else [_ITEM.validate_python(item) for item in previous.items()]
        own = _resolved(request.input, store, owner)
        tools = offered_tools(request)
        messages = conversation(request.instructions, [*history, *own], first=len(history))
        chat = chat_request(request, messages, tools.tools, params)
        return Translated(chat, tools, [_with_id(item) for item in own], previous)

    many = len(request.input) > _MANY_ITEMS or (previous is not None and previous.chain_bytes > _MANY_BYTES)
    return await asyncio.to_thread(translate) if many else translate()


def _resolved(items: Sequence[InputItem], store: ResponseStore, owner: str) -> list[InputItem]:
    """The items, with references replaced by what they refer to."""
    wanted = [item.id for item in items if isinstance(item, ItemReference)]
    if not wanted:
        return list(items)
    found = store.find_items(owner, wanted)
    resolved: list[InputItem] = []
    for number, item in enumerate(items):
        if not isinstance(item, ItemReference):
            resolved.append(item)
        elif item.id in found:
            resolved.append(_ITEM.validate_python(found[item.id]))
        else:
            param = f"input[{number}].id"
            raise BadRequest(
                f"{param} is {item.id[:64]!r}, which is not stored here. Send the item itself.", param=param
            )
    return resolved


def _with_id(item: InputItem) -> Json:
    given: Json = item.model_dump(exclude_none=True)
    return given if "id" in given else given | {"id": new_id(_ID_PREFIXES.get(item.type, "item_"))}


class ResponseTurn(ChatTurn):
    """Drops the beginning of a conversation that is too long, if asked to."""

    def __init__(self, request: ChatRequest, tools: OfferedTools, *, truncates: bool) -> None:
        """`truncates`: whether the conversation's first turns are dropped if it is too long."""
        super().__init__(request)
        self._tools = tools
        self._truncates = truncates

    async def prepare(self, model: Model) -> list[Request]:
        try:
            return await self._fitting(model) if self._truncates else await super().prepare(model)
        except BadRequest as error:
            # The field's name in this dialect.
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

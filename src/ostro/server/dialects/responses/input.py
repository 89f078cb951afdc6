"""Resolves what a request to /v1/responses refers to: the response it continues, and items of stored responses.

Knows the store and items; knows no HTTP and no engine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.schemas.responses import InputItem, ItemReference, ResponseInput
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.responses.items import Json, new_id
from ostro.server.dialects.responses.request import OfferedTools, chat_request, conversation, offered_tools
from ostro.server.dialects.responses.store import Exchange, ResponseStore

# Translating less than this takes less time than waking a thread.
_MANY_ITEMS = 64
_MANY_BYTES = 64 << 10

_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
_ID_KINDS = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}


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
    return given if "id" in given else given | {"id": new_id(_ID_KINDS.get(item.type, "item"))}

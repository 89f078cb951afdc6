"""Resolves what a request to /v1/responses refers to: the response it continues, and items of stored responses;
and shortens a conversation that is too long, if asked to.

Knows the store and items; knows no HTTP.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from ostro.engine.request import Request
from ostro.errors import BadRequest, ContextLengthExceeded
from ostro.sampling_params import SamplingParams
from ostro.schemas.responses import InputItem, ItemReference, ResponseInput
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.chat_turn import ChatTurn
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.responses.request import chat_request, conversation, leaves_trace, offered_tools
from ostro.server.dialects.responses.store import ResponseStore
from ostro.server.dialects.writing import new_id
from ostro.server.models.served import Model
from ostro.text.chat import Message

# Translating less than this takes less time than waking a thread.
_MANY_BYTES = 64 << 10

_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_", "reasoning": "rs_"}


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
    """Reads everything that the request refers to, and drops the beginning of a conversation that is too long, if asked
    to.
    """

    def __init__(
        self, request: ResponseInput, params: SamplingParams, store: ResponseStore, owner: str, *, is_long: bool
    ) -> None:
        """`owner` is the caller's key, and `is_long` says whether the request alone takes long to translate. Raises an
        OstroError if it continues a response that the owner cannot continue.
        """
        previous_id = request.previous_response_id
        self.previous = None if previous_id is None else store.previous(owner, previous_id)
        self.tools = offered_tools(request)
        self.own_items: list[Json] = []
        """The request's own input, each item with an id; known once it is prepared."""
        self._asked = request
        self._params = params
        self._store = store
        self._owner = owner
        continues_long = self.previous is not None and self.previous.chain_bytes > _MANY_BYTES
        super().__init__(self._translated, is_long=is_long or continues_long)

    def _translated(self) -> ChatRequest:
        """Raises BadRequest if it refers to an item that is not stored for the owner."""
        previous, asked = self.previous, self._asked
        history = [] if previous is None else [_ITEM.validate_python(item) for item in previous.items()]
        own = _resolved(asked.input, self._store, self._owner)
        messages = conversation(asked.instructions, [*history, *own], first=len(history))
        self.own_items = [_with_id(item) for item in own if leaves_trace(item)]
        return chat_request(asked, messages, self.tools.tools, self._params)

    async def prepare(self, model: Model) -> list[Request]:
        try:
            request = await self.request(model)
            if self._asked.truncation == "auto":
                return await self._fitting(request, model)
            return await self._prepare(request, model)
        except BadRequest as error:
            # The field's name in this dialect.
            error.param = "input" if error.param == "messages" else self.tools.named(error.param)
            raise

    async def _fitting(self, request: ChatRequest, model: Model) -> list[Request]:
        """Drops as few turns as possible. Raises ContextLengthExceeded if the last turn alone is too long."""
        shorter = [replace(request, messages=messages) for messages in _shorter(request.messages)]
        low, high = 0, len(shorter) - 1
        # Binary search: if a conversation fits, so do all shorter ones.
        while low < high:
            middle = (low + high) // 2
            if await self._fits(shorter[middle], model):
                high = middle
            else:
                low = middle + 1
        return await self._prepare(shorter[low], model)

    async def _fits(self, request: ChatRequest, model: Model) -> bool:
        try:
            await self._prepare(request, model)
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

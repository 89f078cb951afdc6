"""Resolves what a request to /v1/responses refers to: the response it continues, and items of stored responses;
and shortens a conversation that is too long, if asked to.

Knows the store and items; knows no HTTP.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from pydantic import TypeAdapter

from ostro.engine.request import Request
from ostro.errors import BadRequest, ContextLengthExceeded
from ostro.sampling_params import SamplingParams
from ostro.schemas.responses import InputItem, ItemReference, ResponseInput
from ostro.server.admission.ledger import Holding
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.chat_turn import ChatTurn
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.responses.request import (
    OfferedTools,
    chat_request,
    conversation,
    leaves_trace,
    offered_tools,
)
from ostro.server.dialects.responses.store import MAX_CHAIN_BYTES, ResponseStore
from ostro.server.dialects.writing import new_id
from ostro.server.http.body import memory_of
from ostro.server.models.served import Model
from ostro.text.chat import Message

_encode = msgspec.json.Encoder().encode
_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_", "reasoning": "rs_"}


def _resolved(items: Sequence[InputItem], store: ResponseStore, owner: str) -> tuple[list[InputItem], int]:
    """The items, with references replaced by what they refer to; and the memory that this takes."""
    wanted = [item.id for item in items if isinstance(item, ItemReference)]
    if not wanted:
        return list(items), 0
    stored = store.find_items(owner, wanted)
    sizes = {id: len(_encode(item)) for id, item in stored.items()}
    if sum(sizes.get(id, 0) for id in wanted) > MAX_CHAIN_BYTES:
        raise BadRequest(
            f"input refers to items of more than {MAX_CHAIN_BYTES} bytes in all. Refer to fewer.", param="input"
        )
    found = {id: _ITEM.validate_python(item) for id, item in stored.items()}
    resolved: list[InputItem] = []
    for number, item in enumerate(items):
        if not isinstance(item, ItemReference):
            resolved.append(item)
        elif item.id in found:
            resolved.append(found[item.id])
        else:
            param = f"input[{number}].id"
            raise BadRequest(
                f"{param} is {item.id[:64]!r}, which is not stored here. Send the item itself.", param=param
            )
    return resolved, memory_of(stored)


def _stored_form(items: Sequence[InputItem]) -> list[Json]:
    return [_with_id(item) for item in items if leaves_trace(item)]


def _with_id(item: InputItem) -> Json:
    given: Json = item.model_dump(exclude_none=True)
    return given if "id" in given else given | {"id": new_id(_ID_PREFIXES.get(item.type, "item_"))}


class ResponseTurn(ChatTurn):
    """Reads everything that the request refers to, and drops the beginning of a conversation that is too long, if asked
    to.
    """

    def __init__(
        self, request: ResponseInput, params: SamplingParams, store: ResponseStore, owner: str, holding: Holding
    ) -> None:
        """`owner` is the caller's key. Raises an OstroError if the request continues a response that the owner cannot
        continue.
        """
        previous_id = request.previous_response_id
        self.previous = None if previous_id is None else store.previous(owner, previous_id)
        self._tools: OfferedTools | None = None
        self.own_items: list[Json] = []
        """The request's own input, each item with an id; known once it is prepared."""
        self._asked = request
        self._params = params
        self._store = store
        self._owner = owner
        self.holding = holding
        """Counts the items found in the store; a background run substitutes its own."""
        self._found_bytes = 0
        """Memory of what was found in the store: the conversation that it continues, and items that it refers to."""
        # What a reference refers to may be long.
        is_short = self.previous is None and len(request.input) == 1 and not isinstance(request.input[0], ItemReference)
        super().__init__(is_long=holding.is_long or not is_short)

    @property
    def tools(self) -> OfferedTools:
        """Those that the request offers. Reads them first, in time proportional to their number."""
        if self._tools is None:
            self._tools = offered_tools(self._asked)
        return self._tools

    async def request(self, model: Model) -> ChatRequest:
        if self._request is not None:
            return self._request
        own = self.holding.size
        if self.previous is not None:
            # A first guess, before anything is decoded.
            self.holding.hold(own + self.previous.chain_bytes)
        request = await super().request(model)
        self.holding.hold(own + self._found_bytes)
        return request

    def _translated(self) -> ChatRequest:
        """Raises BadRequest if it refers to an item that is not stored for the owner."""
        previous, asked = self.previous, self._asked
        said = [] if previous is None else previous.items()
        history = [_ITEM.validate_python(item) for item in said]
        own, referenced = _resolved(asked.input, self._store, self._owner)
        self._found_bytes = memory_of(said) + referenced
        messages = conversation(asked.instructions, [*history, *own], first=len(history))
        self.own_items = _stored_form(own)
        return chat_request(asked, messages, self.tools.tools, self._params)

    def given_items(self) -> list[Json]:
        """The items as the request has them, without those that it refers to."""
        return _stored_form(self._asked.input)

    async def prepare(self, model: Model) -> list[Request]:
        try:
            request = await self.request(model)
            if self._asked.truncation == "auto":
                return await self._fitting(request, model)
            return await self._prepare(request, model)
        except BadRequest as error:
            # The field's name in this dialect. No tool is to blame before they are read.
            if error.param == "messages":
                error.param = "input"
            elif self._tools is not None:
                error.param = self._tools.named(error.param)
            raise

    async def _fitting(self, request: ChatRequest, model: Model) -> list[Request]:
        """Drops as few turns as possible. Raises ContextLengthExceeded if the last turn alone is too long."""
        starts = _starts(request.messages)
        low, high = 0, len(starts) - 1
        # Binary search: if a conversation fits, so do all shorter ones.
        while low < high:
            middle = (low + high) // 2
            if await self._fits(_shortened(request, starts[middle]), model):
                high = middle
            else:
                low = middle + 1
        return await self._prepare(_shortened(request, starts[low]), model)

    async def _fits(self, request: ChatRequest, model: Model) -> bool:
        try:
            await self._prepare(request, model)
        except ContextLengthExceeded:
            return False
        return True


def _starts(messages: Sequence[Message]) -> list[int]:
    """Where the whole conversation begins after its first system messages, and then ever shorter ones, each at a later
    user message.
    """
    begin = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    later = (at for at in range(begin + 1, len(messages)) if messages[at]["role"] == "user")
    return [begin, *later]


def _shortened(request: ChatRequest, start: int) -> ChatRequest:
    """The conversation from there on. System messages at the beginning are always kept."""
    begin = _starts(request.messages[: start + 1])[0]
    return replace(request, messages=[*request.messages[:begin], *request.messages[start:]])

"""/v1/responses: OpenAI's Responses API, with stored and background responses."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.errors import BadRequest, OstroError, Unsupported
from ostro.frontend.outputs import Completion
from ostro.sampling_params import SamplingParams
from ostro.schemas.responses import (
    CountResponseTokens,
    CreateResponse,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseEvent,
    ResponseInput,
    ResponseObject,
)
from ostro.server.api import Api, json_response, record_of, written
from ostro.server.api_docs.document import described
from ostro.server.dialects.chat_turn import SingleChoiceReader
from ostro.server.dialects.responses import background
from ostro.server.dialects.responses.event_log import EventLog
from ostro.server.dialects.responses.framing import DIALECT
from ostro.server.dialects.responses.input import ResponseTurn
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.responses.request import OfferedTools
from ostro.server.dialects.responses.store import StoredResponse
from ostro.server.dialects.responses.writer import ResponseAnswerWriter, ResponseWriter
from ostro.server.generation import Answer, Job, num_prompt_tokens
from ostro.server.http.body import HeldResponse, decoding, holding_of
from ostro.server.models.served import Model

_EVENTS = "`event:` and `data:` lines, with a {name} as data; the last is response.completed, .incomplete or .failed."
_CANCEL_SECONDS = 30.0
_MAX_TOLD = 64
_LISTED, _MOST_LISTED = 20, 100

_encode = msgspec.json.Encoder().encode
_log = structlog.stdlib.get_logger("ostro.server")


def router(api: Api) -> APIRouter:
    routes = APIRouter(prefix=DIALECT.path, tags=["responses"])
    store = api.responses
    told: set[str] = set()

    def turn_of(http: Request, request: ResponseInput, params: SamplingParams) -> ResponseTurn:
        return ResponseTurn(request, params, store, record_of(http).key, holding_of(http))

    @routes.post(
        "",
        **described(ResponseObject, request=CreateResponse, events=ResponseEvent, event_words=_EVENTS),
    )
    async def create_response(http: Request) -> Response:
        """The model's answer to a string or to a list of items: messages, tool calls and their outputs."""
        request = await api.read(CreateResponse, http)
        record_of(http).stream = request.stream
        for field in ("store", "background"):
            if getattr(request, field):
                store.check_is_on(field)
        turn = turn_of(http, request, api.options.params(request))
        return await _answer(api, http, request, turn, told)

    @routes.post("/input_tokens", **described(InputTokens, request=CountResponseTokens))
    async def count_input_tokens(http: Request) -> Response:
        """The number of tokens in a response's input."""
        request = await api.read(CountResponseTokens, http)
        turn = turn_of(http, request, SamplingParams())
        return json_response(InputTokens(input_tokens=await num_prompt_tokens(api, http, request.model, turn)))

    @routes.post("/compact", include_in_schema=False)
    async def compact() -> Response:
        raise Unsupported("Conversations are not compacted here. Send fewer items, or set truncation to auto.")

    @routes.get("/{id}", **described(ResponseObject, not_found=True, refusable=True))
    async def retrieve_response(http: Request, id: str) -> Response:
        """A stored response. `stream=true` replays the events of one that was created with `background` and `stream`:
        all of them, or those after number `starting_after`.
        """
        stored = store.get(record_of(http).key, id)
        if http.query_params.get("stream", "false") == "true":
            return _replay(api, http, stored)
        return _body(http, stored)

    @routes.delete("/{id}", **described(DeletedResponse, not_found=True))
    async def delete_response(http: Request, id: str) -> Response:
        """Deletes a stored response, and cancels it if it is still running. Responses that continue it are kept."""
        store.delete(record_of(http).key, id)
        return json_response(DeletedResponse(id=id))

    @routes.post("/{id}/cancel", **described(ResponseObject, not_found=True, refusable=True))
    async def cancel_response(http: Request, id: str) -> Response:
        """Cancels a background response."""
        stored = store.get(record_of(http).key, id)
        if stored.run is None or stored.run.is_over:
            why = "was not created with background" if stored.run is None else "has ended"
            raise BadRequest(f"The response {id[:64]} {why}, so there is nothing to cancel.")
        stored.run.cancel()
        await stored.run.ended(_CANCEL_SECONDS)
        return _body(http, stored)

    @routes.get("/{id}/input_items", **described(InputItemList, not_found=True, refusable=True))
    async def list_input_items(http: Request, id: str) -> Response:
        """The input items of a stored response, newest first unless `order` is asc. `after` (an item's id) and `limit`
        select a page.
        """
        stored = store.get(record_of(http).key, id)
        # A first guess, before anything is decoded.
        holding_of(http).hold(len(stored.exchange.inputs))
        return HeldResponse(http, written(_listed(http, await asyncio.to_thread(stored.inputs))))

    return routes


async def _answer(api: Api, http: Request, request: CreateResponse, turn: ResponseTurn, told: set[str]) -> Response:
    """`told` are the kinds of tools whose dropping was logged."""
    store, key = api.responses, record_of(http).key
    keeps = store.is_on and request.store is not False
    writer = ResponseWriter(request, model=request.model, is_stored=keeps)

    def offer() -> None:
        writer.offer(turn.tools)
        _log_dropped_tools(turn.tools, told)

    if request.background:
        # The response repeats its tools at once. Others read theirs inside the gate.
        await decoding(lambda: turn.tools)
        offer()
        job = _job(request, turn, writer, lambda: None, lambda: None, streams=True)
        run = background.begin(api, http, turn, writer, job, logs=request.stream)
        if run.log is not None:
            return _followed(api, http, writer.id, run.log)
        return json_response(ResponseObject.model_validate(writer.response))

    def keep() -> None:
        if keeps:
            store.keep(key, writer.response, turn.own_items, turn.previous)

    return Answer(api, http, _job(request, turn, writer, offer, keep, streams=request.stream))


def _followed(api: Api, http: Request, id: str, log: EventLog) -> Response:
    """The events of a response that has just begun. If there is no room to read them, there is no response either."""
    try:
        return background.Replay(log, holding_of(http), after=-1, ping_seconds=api.options.ping_seconds)
    except OstroError:
        api.responses.delete(record_of(http).key, id)
        raise


def _job(
    request: CreateResponse,
    turn: ResponseTurn,
    writer: ResponseWriter,
    begin: Callable[[], None],
    keep: Callable[[], None],
    *,
    streams: bool,
) -> Job:
    def writer_of(model: Model, completions: list[Completion]) -> ResponseAnswerWriter:
        begin()
        [completion] = completions
        reader = SingleChoiceReader(turn.reader(completion), model)
        return ResponseAnswerWriter(writer, reader, model.service.tokenizer, model=model.name, keep=keep)

    return Job.written(request.model, turn.prepare, writer_of, streams=streams)


def _log_dropped_tools(tools: OfferedTools, told: set[str]) -> None:
    """Clients send hosted tools by default, so they are dropped rather than refused, and each kind is logged once. The
    number of kinds is limited, because clients may make them up.
    """
    new = [kind for kind in tools.left_out if kind not in told][: _MAX_TOLD - len(told)]
    if new:
        told.update(new)
        _log.warning("dropped hosted tools, which cannot run here, from a request", kinds=", ".join(new))


def _body(http: Request, stored: StoredResponse) -> Response:
    body = _encode(stored.run.response) if stored.run is not None and stored.is_running else stored.body
    return HeldResponse(http, body)


def _replay(api: Api, http: Request, stored: StoredResponse) -> Response:
    log = None if stored.run is None else stored.run.log
    if log is not None and log.is_lost:
        raise Unsupported(
            "The events of this response were dropped, because the store was full. Get it without stream.",
            param="stream",
        )
    if log is None:
        raise Unsupported(
            "Events are kept only for responses created with background and stream. Get this one without stream.",
            param="stream",
        )
    record_of(http).stream = True
    after = _integer(http, "starting_after", -1, low=0)
    return background.Replay(log, holding_of(http), after=after, ping_seconds=api.options.ping_seconds)


def _listed(http: Request, items: list[Json]) -> InputItemList:
    order, after = http.query_params.get("order", "desc"), http.query_params.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc, got {order[:64]!r}.", param="order")
    limit = _integer(http, "limit", _LISTED, low=1, high=_MOST_LISTED)
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise BadRequest(f"after is {after[:64]!r}, but there is no such item.", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ids = [str(item["id"]) for item in page]
    return InputItemList(
        data=page, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=len(items) > limit
    )


def _integer(http: Request, name: str, default: int, *, low: int, high: int | None = None) -> int:
    given = http.query_params.get(name)
    if given is None:
        return default
    number = int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else low - 1
    if number < low or (high is not None and number > high):
        span = f"from {low}" + ("" if high is None else f" to {high}")
        raise BadRequest(f"{name} must be a number {span}, got {given[:64]!r}.", param=name)
    return number

"""Takes an HTTP request through admission to the engine, and back as one body or as a stream of events.

read, parse ──> model ──> prepare ──┬─────────────────────────────┬──> engine ──┬──> one JSON body
   4xx         404, 503     4xx     └──> wait, queued ──> model ──┘             └──> first event in hand: 200, events,
                                           429, 503    404, 503                      [DONE]

If the client disconnects, everything after parsing is cancelled. Knows jobs; knows no endpoint.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostro.engine.request import Request as EngineRequest
from ostro.errors import OstroError
from ostro.frontend.outputs import Completion, Delta
from ostro.schemas.wire import WireModel
from ostro.server.admission.limits import Ticket
from ostro.server.api import Api, json_response, record_of
from ostro.server.dialects.chat_turn import ChatTurn
from ostro.server.dialects.writing import AnswerWriter, StreamWriter
from ostro.server.http.body import holding_of
from ostro.server.http.disconnect import ClientGone, UntilDisconnect
from ostro.server.http.sse import EventStream
from ostro.server.models.served import Model
from ostro.server.models.service import Generation
from ostro.server.telemetry.record import RequestRecord

# Fewer are written faster than a thread wakes up.
_MANY_ENTRIES = 256
# Prompts that are submitted to the engine before other tasks get a turn on the event loop.
_FEW = 32

_T = TypeVar("_T")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's work for the engine, and how to write its response."""

    model: str
    """The client's name for the model."""
    prepare: Callable[[Model], Awaitable[list[EngineRequest]]]
    respond: Callable[[Model, list[Completion]], WireModel]
    writer: Callable[[Model, list[Completion]], StreamWriter] | None = None
    """For a stream: creates the writer of its events, given the completions that are being generated."""
    finish: Callable[[Sequence[Generation]], Awaitable[None]] | None = None
    """Work that remains once all completions have ended, before `respond`."""

    @classmethod
    def written(
        cls,
        model: str,
        prepare: Callable[[Model], Awaitable[list[EngineRequest]]],
        writer: Callable[[Model, list[Completion]], AnswerWriter],
        *,
        streams: bool,
    ) -> Self:
        """A job whose response one kind of writer writes, streamed or whole."""

        def respond(model: Model, completions: list[Completion]) -> WireModel:
            return writer(model, completions).whole()

        return cls(model, prepare, respond, writer if streams else None)


class Answer(Response):
    """A job's response. The job runs while it is sent, so that one block spans it from the gate to the last byte."""

    def __init__(self, api: Api, http: Request, job: Job) -> None:
        super().__init__()
        self._api = api
        self._record = record_of(http)
        self._record.asked_model = job.model
        self._holding = holding_of(http)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In its own task: otherwise each token would resume two dozen nested coroutines.
        await asyncio.create_task(self._answer(scope, receive, send), name="answer")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        try:
            async with UntilDisconnect(receive), self._api.gate.admit(self._record) as ticket:
                model, requests = await self._turn(ticket)
                generations = await _spread(model.service.stream, requests)
                try:
                    if job.writer is not None:
                        await self._stream(ticket, generations, partial(job.writer, model), send)
                        return
                    completions = await _all(ticket, generations)
                    if job.finish is not None:
                        await ticket.within(job.finish(generations))
                    response = await self._respond(model, completions)
                finally:
                    _record_engine_times(self._record, generations)
            await response(scope, receive, send)
        except ClientGone:
            self._record.error = "client_gone"

    async def _turn(self, ticket: Ticket) -> tuple[Model, list[EngineRequest]]:
        """Waits for admission. Returns the model, in use, and the requests to submit to its engine.

        A request that waits releases the model, since others may need its memory. If it has been unloaded when the turn
        comes, the turn is lent to others until it is loaded again; but only once, or a request might never have both.
        """
        prepare, keeps_turn = self._job.prepare, False
        model = await self._take(ticket)
        self._record.model = model.name
        requests = ticket.enlist(await ticket.prepare(partial(prepare, model)))
        self._record.num_prompts, self._record.params = len(requests), requests[0].params
        self._holding.count_tokens(self._record.prompt_tokens or 0)
        self._holding.count_answer(lambda: self._record.completion_tokens)
        while not ticket.enter():
            await ticket.let_go()
            await ticket.turn()
            with nullcontext() if keeps_turn else ticket.lend_slot_unless_immediate():
                again = await self._take(ticket)
            keeps_turn = True
            if again.service is not model.service:
                # The model was reloaded, and requests are specific to one service.
                model, requests = again, ticket.enlist(await ticket.prepare(partial(prepare, again)))
        return model, requests

    async def _take(self, ticket: Ticket) -> Model:
        """The model, in use. Loading it, if necessary, counts against the request's deadline."""
        return await ticket.take(self._api.models.use(self._job.model, ticket.record.key), self._job.model)

    async def _respond(self, model: Model, completions: list[Completion]) -> Response:
        def respond() -> Response:
            body = self._job.respond(model, completions)
            self._record.response_id = getattr(body, "id", None)
            return json_response(body)

        # The response to an evaluation may have a million entries, and take a second to write.
        many = sum(map(_num_entries, completions)) > _MANY_ENTRIES
        return await model.service.run_off_loop(respond) if many else respond()

    async def _stream(
        self,
        ticket: Ticket,
        generations: Sequence[Generation],
        make_writer: Callable[[list[Completion]], StreamWriter],
        send: Send,
    ) -> None:
        writer = make_writer([generation.completion for generation in generations])
        self._record.response_id = writer.id
        streams = [ticket.watch(generation) for generation in generations]
        async with aclosing(_merged(streams) if len(streams) > 1 else _alone(streams[0])) as progress:
            # Nothing is sent before the first engine event: until then, an error can still set the status.
            first = [writer.start() + writer.of(*await anext(progress))]
            try:
                async with EventStream(send, writer.framing, ping_seconds=self._api.options.ping_seconds) as events:
                    # Taken out: it may be long, and must not stay until the last event.
                    if data := first.pop():
                        await events.write(data)
                    async for number, deltas in progress:
                        if data := writer.of(number, deltas):
                            await events.write(data)
                    await events.write(writer.end())
            except OstroError as error:
                # The stream has already reported it.
                self._record.error = error.openai_code or error.openai_type


async def num_prompt_tokens(api: Api, http: Request, name: str, turn: ChatTurn) -> int:
    """The number of tokens in the prompt that the model would get. Passes the admission gate."""
    async with api.gate.admit(record_of(http)) as ticket:
        model = await ticket.take(api.models.use(name, ticket.record.key), name)
        service = model.service

        async def count() -> int:
            rendered = await service.render_chat(await turn.request(model))
            return await service.run_off_loop(lambda: len(service.tokenizer.encode_rendered(rendered)))

        return await ticket.prepare(count)


async def _all(ticket: Ticket, generations: Sequence[Generation]) -> list[Completion]:
    """Runs all generations to their ends. The first failure cancels the others."""
    if len(generations) == 1:
        return [await ticket.complete(generations[0].run())]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = await _spread(lambda each: group.create_task(ticket.complete(each.run())), generations)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


_Deltas = AsyncGenerator[list[Delta], None]
_Numbered = AsyncGenerator[tuple[int, list[Delta]], None]


async def _alone(stream: _Deltas) -> _Numbered:
    async with aclosing(stream):
        async for deltas in stream:
            yield 0, deltas


async def _merged(streams: Sequence[_Deltas]) -> _Numbered:
    """The deltas of several prompts in order of arrival, each with its prompt's number."""
    # A queue of one: deltas that are not consumed yet stay in their own stream, which merges them.
    queue: asyncio.Queue[tuple[int, list[Delta]] | Exception | None] = asyncio.Queue(1)

    async def pump(number: int) -> None:
        try:
            async for deltas in streams[number]:
                await queue.put((number, deltas))
        except Exception as error:  # noqa: BLE001  the reader raises it
            await queue.put(error)
        else:
            await queue.put(None)

    pumps: list[asyncio.Task[None]] = []
    try:
        await _spread(lambda number: pumps.append(asyncio.create_task(pump(number))), range(len(streams)))
        unfinished = len(streams)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _spread(make: Callable[[_T], _Made], items: Sequence[_T]) -> list[_Made]:
    """`[make(item) for item in items]`, which yields to the event loop every few items."""
    made = []
    for number, item in enumerate(items, 1):
        made.append(make(item))
        if number % _FEW == 0:
            await asyncio.sleep(0)
    return made


def _num_entries(completion: Completion) -> int:
    """The number of entries in the response: choices, tokens with log-probabilities, numbers of a vector."""
    of_choices = sum(1 + len(choice.logprobs or ()) for choice in completion.choices)
    return of_choices + len(completion.prompt_logprobs or ()) + len(completion.embedding or ())


def _record_engine_times(record: RequestRecord, generations: Sequence[Generation]) -> None:
    """Records timings and counts that the engine reported. With several prompts, the earliest times count."""
    record.began = min((each.began for each in generations if each.began is not None), default=None)
    if record.began is None:
        return
    record.first_token = min((each.first_token for each in generations if each.first_token is not None), default=None)
    record.preemptions = sum(each.preemptions for each in generations)
    record.cached_tokens = sum(each.completion.num_cached for each in generations)

"""Runs background responses without a client, and replays their events to clients that come back.

Knows the store, jobs and ASGI; knows no routes.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from http import HTTPStatus

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostro.engine.request import Request as EngineRequest
from ostro.errors import OstroError, TryLater, internal_error
from ostro.server.admission.ledger import Holding
from ostro.server.api import Api, end_record, record_of
from ostro.server.dialects.responses.event_log import BackgroundRun, EventLog
from ostro.server.dialects.responses.framing import DIALECT
from ostro.server.dialects.responses.input import ResponseTurn
from ostro.server.dialects.responses.store import StoredResponse
from ostro.server.dialects.responses.writer import ResponseWriter
from ostro.server.error_handlers import note_error
from ostro.server.generation import Answer, Job
from ostro.server.http.disconnect import ClientGone, UntilDisconnect
from ostro.server.http.sse import EventStream
from ostro.server.models.served import Model
from ostro.server.telemetry.record import RequestRecord

_UNENDED = ("queued", "in_progress")
_log = structlog.stdlib.get_logger("ostro.server")


def begin(
    api: Api, http: Request, turn: ResponseTurn, writer: ResponseWriter, job: Job, *, logs: bool
) -> BackgroundRun:
    """Stores the response and starts it. `logs`: whether its events are kept for clients to read."""
    run = BackgroundRun(writer.response, log=EventLog() if logs else None)
    writer.response["status"] = "queued"
    queued = writer.queue() if logs else b""
    store = api.responses
    stored = store.begin(record_of(http).key, writer.id, turn.holding.size, turn.previous, run)

    async def prepare(model: Model) -> list[EngineRequest]:
        requests = await job.prepare(model)
        store.add_inputs(stored, turn.own_items)
        return requests

    run.has_room = partial(store.grow, stored)
    run.write(queued)
    turn.holding = turn.holding.hand_over()
    running = _run(api, http, stored, run, writer, replace(job, prepare=prepare), turn)
    run.task = asyncio.create_task(running, name="background response")
    return run


async def _run(
    api: Api,
    http: Request,
    stored: StoredResponse,
    run: BackgroundRun,
    writer: ResponseWriter,
    job: Job,
    turn: ResponseTurn,
) -> None:
    with turn.holding:
        await _answer(api, http, stored, run, writer, job, turn)


async def _answer(
    api: Api,
    http: Request,
    stored: StoredResponse,
    run: BackgroundRun,
    writer: ResponseWriter,
    job: Job,
    turn: ResponseTurn,
) -> None:
    record = _own_record(record_of(http))
    state = http.scope["state"] | {"record": record, "holding": turn.holding}
    alone = Request({**http.scope, "state": state})
    try:
        await Answer(api, alone, job)(alone.scope, run.receive, run.send)
    except OstroError as error:
        note_error(alone.scope, error)
        record.status = error.http_status
        run.write(writer.fail(error))
    except Exception:  # noqa: BLE001  nobody else would see it
        _log.exception("a background response failed unexpectedly", request_id=record.id)
        record.status = HTTPStatus.INTERNAL_SERVER_ERROR
        run.write(writer.fail(internal_error()))
    else:
        record.status = HTTPStatus.OK
    finally:
        if writer.response["status"] in _UNENDED:
            record.error = "cancelled"
            run.write(writer.cancel())
        try:
            if not turn.own_items:
                # It ended before its input was read.
                api.responses.add_inputs(stored, await asyncio.to_thread(turn.given_items))
            api.responses.update(stored, writer.response)
        finally:
            run.end()
            end_record(http, record)


def _own_record(record: RequestRecord) -> RequestRecord:
    """A record for work that continues after its HTTP request has ended."""
    return RequestRecord(
        id=record.id,
        method=record.method,
        path=record.path,
        route=record.route,
        key=record.key,
        is_operator=record.is_operator,
        may_raise_priority=record.may_raise_priority,
        stream=record.stream,
    )


class Replay(Response):
    """A background response's events, past and future."""

    def __init__(self, log: EventLog, holding: Holding, *, after: int, ping_seconds: float) -> None:
        """Raises an OstroError if `holding`, the reader's, has no room for an event."""
        super().__init__()
        holding.hold(log.longest)
        self._log = log
        self._after = after
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with UntilDisconnect(receive), EventStream(send, DIALECT, ping_seconds=self._ping_seconds) as out:
                async with aclosing(self._log.after(self._after)) as events:
                    async for data in events:
                        await out.write(data)
                if self._log.is_lost:
                    raise TryLater(
                        "The response's events are no longer stored: it was deleted, or the store has no room. Get the "
                        "response when it is done."
                    )
        except ClientGone:
            pass
        except OstroError as error:
            # The stream has already reported it.
            note_error(scope, error)

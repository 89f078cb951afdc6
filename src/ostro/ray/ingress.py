"""The application's front end: reads a request, has a replica chosen for it, and passes bytes through. Knows ASGI and
how to call replicas; answers nothing itself that a replica could.

A request that a replica would refuse before reading its body (wrong key, too long) is forwarded without it, so that it
gets the same error as from `ostro serve`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from http import HTTPStatus
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ostro.errors import BodyTimeout, NotAllowed, NotAuthorized, OstroError, Unavailable
from ostro.ray.call import NO_KEY, Call, key_of
from ostro.ray.exposition import merged
from ostro.ray.replica import WholeAnswer
from ostro.routing.key import Key
from ostro.server.auth import ADMIN_PREFIX, METRICS_PATH, OPEN_PATHS, Keyring, check_caller
from ostro.server.body import BodyLimits
from ostro.server.dialects.broken_stream import last_event
from ostro.server.disconnect import ClientGone, UntilDisconnect
from ostro.server.error_handlers import error_response
from ostro.server.hosts import HostRule
from ostro.server.metrics import CONTENT_TYPE

# Short bodies are parsed faster than a thread wakes up; very long ones are not parsed, and go to the least loaded.
_LONG_BODY, _LONGEST_READ = 64 << 10, 2 << 20
# Probes must not wait for a replica that may never start.
_PROBE_SECONDS = 5.0
# A replica reports a timeout itself, in different words than if there is no replica: give it time to.
_LATE_SECONDS = 10.0
_DIED = "The replica that was at work on this request has ended. Send it again: others are there, or will be."
_NONE_CAME = "No replica has taken the request in time. Try again in a moment."

T = TypeVar("T", covariant=True)


class Answering(Protocol):
    """Serve's generator of a replica's messages."""

    def __aiter__(self) -> AsyncIterator[list[Message]]: ...
    def cancel(self) -> None: ...


class Engines(Protocol):
    """The ingress's view of the replicas."""

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """Exceptions raised if a replica has died or none is available."""

    def ask(self, call: Call) -> Answering: ...
    def ask_all(self, call: Call) -> Awaitable[Sequence[WholeAnswer | BaseException]]: ...


class Ingress:
    """An ASGI application."""

    def __init__(
        self,
        engines: Engines,
        keyring: Keyring,
        limits: BodyLimits,
        request_seconds: float,
        hosts: HostRule | None = None,
    ) -> None:
        """`request_seconds` is the maximum time to the first byte of an answer. `hosts` are the host names that
        requests without a key may use; None allows any.
        """
        self._engines = engines
        self._keyring = keyring
        self._hosts = hosts
        self._limits = limits
        self._wait_seconds = request_seconds + _LATE_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                await self._serve(scope, receive, send)
            except ClientGone:
                pass
            except OstroError as error:
                await error_response(error, scope)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope)
        body = await self._body(call, Request(scope, receive))
        call = Call.of(scope, body, await _key(call.path, body))
        async with UntilDisconnect(receive):
            if call.method in ("GET", "POST") and (
                call.path == METRICS_PATH or call.path.startswith(ADMIN_PREFIX + "/")
            ):
                await (await self._from_all(call))(scope, receive, send)
            else:
                await self._relay(call, send)

    async def _relay(self, call: Call, send: Send) -> None:
        seconds = _PROBE_SECONDS if call.path in OPEN_PATHS else self._wait_seconds
        relay = _Relay(call, send)
        answering = self._engines.ask(call)
        try:
            async with asyncio.timeout(seconds) as limit:
                async for messages in answering:
                    limit.reschedule(None)
                    for message in messages:
                        await relay.send(message)
        except TimeoutError:
            raise Unavailable(_NONE_CAME) from None
        except self._engines.faults as fault:
            await relay.fail(fault)
        finally:
            if not relay.is_over:
                answering.cancel()

    async def _from_all(self, call: Call) -> Response:
        """All replicas' answers merged into one, or the first refusal."""
        try:
            answers = [answer for answer in await self._engines.ask_all(call) if isinstance(answer, WholeAnswer)]
        except TimeoutError:
            raise Unavailable(_NONE_CAME) from None
        except self._engines.faults as fault:
            raise Unavailable(_NONE_CAME) from fault
        if not answers:
            raise Unavailable(_NONE_CAME)
        for answer in answers:
            if answer.status != HTTPStatus.OK:
                return _copied(answer)
        if call.path == METRICS_PATH:
            body, kind = merged({each.replica: each.body.decode() for each in answers}), CONTENT_TYPE
        else:
            told = {"replicas": {each.replica: json.loads(each.body) for each in answers}}
            body, kind = json.dumps(told).encode(), "application/json"
        response = Response(body, media_type=kind)
        # Keeps the CORS headers.
        response.raw_headers += [
            pair for pair in answers[0].headers if pair[0].startswith((b"access-control-", b"vary"))
        ]
        return response

    async def _body(self, call: Call, http: Request) -> bytes:
        """Empty if the request will be refused because of its headers."""
        announced = http.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limits.max_bytes:
            return b""
        try:
            check_caller(self._keyring, self._hosts, [call.path, call.raw_path.decode("latin-1")], http.headers)
        except (NotAuthorized, NotAllowed):
            return b""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await _read(http, self._limits.max_bytes)
        except TimeoutError:
            raise BodyTimeout(
                f"The body did not arrive within {self._limits.seconds:g} seconds. Send it faster."
            ) from None
        except ClientDisconnect as error:
            raise ClientGone from error


class _Relay:
    """Passes on one answer, and terminates it properly if its replica dies."""

    def __init__(self, call: Call, send: Send) -> None:
        self._send = send
        self._scope = call.scope()
        self._request_id = dict(call.headers).get(b"x-request-id")
        self._started = False
        self._is_stream = False
        self.is_over = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            self._started = True
            self._is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            # Serve's proxy adds the same header.
            message = {**message, "headers": [each for each in headers if each != (b"x-request-id", self._request_id)]}
        elif message["type"] == "http.response.body":
            self.is_over = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, fault: Exception) -> None:
        """Ends the answer as well as still possible: with an error response, a final event, or a broken connection."""
        if self.is_over:
            return
        error = Unavailable(_DIED)
        if not self._started:
            raise error from fault
        if not self._is_stream:
            raise fault
        last = last_event(self._scope, error)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        self.is_over = True


async def _read(http: Request, most: int) -> bytes:
    """Reads slightly more than `most` of a body that is too long, so that the replica notices."""
    body = bytearray()
    async for part in http.stream():
        body += part[: most + 1 - len(body)]
        if len(body) > most:
            break
    return bytes(body)


async def _key(path: str, body: bytes) -> Key:
    if not body or len(body) > _LONGEST_READ:
        return NO_KEY
    return key_of(path, body) if len(body) <= _LONG_BODY else await asyncio.to_thread(key_of, path, body)


def _copied(answer: WholeAnswer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = [(name, value) for name, value in answer.headers if name != b"x-request-id"]
    return response


async def _live(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})

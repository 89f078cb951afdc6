"""The application's front end: reads a request, has a replica chosen for it, and passes bytes through. Knows ASGI and
how to call replicas; answers nothing itself that a replica could.

A request with a wrong key is forwarded without its body, and to one replica only, so that it gets the same error as
from `ostro serve`. Bodies have the limits and the ledger of `ostro serve`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ostro.errors import NotAllowed, NotAuthorized, OstroError, Unavailable
from ostro.ray.broadcast import NONE_CAME, AllEngines, answer_of_all, concerns_all
from ostro.ray.forwarded_request import ForwardedRequest, read_key
from ostro.server.admission.auth import ANONYMOUS, OPEN_PATHS, Keyring, check_caller
from ostro.server.admission.hosts import HostRule
from ostro.server.admission.ledger import Holding, Ledger
from ostro.server.dialects.registry import dialect_of
from ostro.server.error_handlers import error_response
from ostro.server.http.body import BodyLimits, read_body
from ostro.server.http.disconnect import ClientGone, UntilDisconnect

# Probes must not wait for a replica that may never start.
_PROBE_SECONDS = 5.0
# A replica reports a timeout itself, in different words than if there is no replica: give it time to.
_LATE_SECONDS = 10.0
_DIED = "The replica that was working on this request has died. Send it again: another replica will take it."


class Answering(Protocol):
    """Serve's generator of a replica's messages."""

    def __aiter__(self) -> AsyncIterator[list[Message]]: ...
    def cancel(self) -> None: ...


class Engines(AllEngines, Protocol):
    """The ingress's view of the replicas."""

    def ask(self, call: ForwardedRequest) -> Answering: ...


class Ingress:
    """An ASGI application."""

    def __init__(
        self,
        engines: Engines,
        keyring: Keyring,
        limits: BodyLimits,
        request_seconds: float,
        hosts: HostRule | None = None,
        num_places: int = 0,
    ) -> None:
        """`request_seconds` is the maximum time to the first byte of an answer. `hosts` are the host names that
        requests without a key may use; None allows any. `num_places` is how many requests may run or wait in a replica.
        """
        self._engines = engines
        self._keyring = keyring
        self._hosts = hosts
        self._limits = limits
        self._ledger = Ledger(limits.budget, num_keys=keyring.num_callers, num_places=num_places)
        self._wait_seconds = request_seconds + _LATE_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
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
        call, http = ForwardedRequest.of(scope), Request(scope, receive)
        caller = caller_of(call, http.headers, self._keyring, self._hosts)
        if caller is None or call.path in OPEN_PATHS:
            # Bodies of callers without a key would take the room of those who have one.
            async with UntilDisconnect(receive):
                await self._relay(call, send)
            return
        with Holding(self._ledger, caller, is_operator=self._keyring.is_operator(caller)) as holding:
            body = bytes(await read_body(http, self._limits, holding))
            call = ForwardedRequest.of(scope, body, await read_key(call.path, body))
            async with UntilDisconnect(receive):
                if concerns_all(call.method, call.path):
                    await (await answer_of_all(self._engines, call))(scope, receive, send)
                else:
                    await self._relay(call, send)

    async def _relay(self, call: ForwardedRequest, send: Send) -> None:
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
            raise Unavailable(NONE_CAME) from None
        except self._engines.faults as fault:
            await relay.fail(fault)
        finally:
            if not relay.is_over:
                answering.cancel()


class _Relay:
    """Passes on one answer, and terminates it properly if its replica dies."""

    def __init__(self, call: ForwardedRequest, send: Send) -> None:
        self._send = without_request_id(call, send)
        self._scope = call.scope()
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
        last = dialect_of(self._scope).failed(error)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        self.is_over = True


def caller_of(call: ForwardedRequest, headers: Headers, keyring: Keyring, hosts: HostRule | None) -> str | None:
    """The label of the caller's key; None if a replica refuses the caller."""
    try:
        key = check_caller(keyring, hosts, [call.path, call.raw_path.decode("latin-1")], headers)
    except (NotAuthorized, NotAllowed):
        return None
    return ANONYMOUS if key is None else key.label


def without_request_id(call: ForwardedRequest, send: Send) -> Send:
    """Drops the request id from the answer, because Serve adds the same header."""
    header = (b"x-request-id", dict(call.headers).get(b"x-request-id"))

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [each for each in message["headers"] if each != header]}
        await send(message)

    return send_on


async def live(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})

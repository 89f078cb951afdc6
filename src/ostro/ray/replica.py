"""An engine replica: Ostro's own application and engine process, driven by calls instead of a socket. Knows the
server's components and ASGI; knows no Ray, so that it can be tested without.

It counts as started once its models are warm, as /readyz would report, and as unhealthy once they have failed for good.
A restarting engine is neither: it answers 503 for a moment while other replicas take the requests.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostro.engine_process.messages import Heartbeat, ModelInfo
from ostro.errors import ModelError
from ostro.pool.pool import PoolState
from ostro.ray.forwarded_request import ForwardedRequest, read_key
from ostro.routing.key import Key
from ostro.routing.report import HotPrefixes, Report
from ostro.server.lifecycle import News, assemble, build_gate
from ostro.server.models.build import build_models
from ostro.server.models.served import ANY, Models
from ostro.server.settings import Given, read_settings
from ostro.server.telemetry.tracing.start import Tracer, start_tracing

REPLICA_HEADER = b"x-ostro-replica"
ROUTER_HEADER = b"x-serve-router-ostro"
"""Set by HAProxy, which removes client headers with this prefix."""
# Routers come and go; those that are gone need not be told anything.
_MOST_ROUTERS = 256
# A client without a key may send any router's name. A router sees from the load that such a request is over.
_NOT_ADMITTED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS)

_LOOK_SECONDS = 0.25
# How long the application may take to finish after a disconnect before it is cancelled.
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """For people and tests: a replica's process, its engines' processes, and their load."""

    replica: str
    pid: int
    engine_pids: list[int]
    models: list[str]
    requests: int
    running: int
    waiting: int


class EngineReplica:
    """`await start()`, then any number of concurrent `answer` calls, then `await stop()`. Use within one event loop."""

    def __init__(self, given: Mapping[str, Given], name: str) -> None:
        """`given` settings take precedence over this machine's environment; `name` is shown in answers."""
        self.settings = read_settings(given).settings
        self.name = name
        self._models: Models | None = None
        self._app: ASGIApp | None = None
        self._telling: asyncio.Task[None] | None = None
        self._tracer: Tracer | None = None
        self._num_open = 0
        self.finished: dict[str, int] = {}
        """Requests that were admitted and have ended, by the router that sent them."""
        self._hot = HotPrefixes()
        self._engine_pids: set[int] = set()
        self._tokens_before = 0

    async def start(self) -> None:
        """Returns once requests can be served; raises ModelError if they never can be."""
        settings = self.settings
        self._tracer = start_tracing(settings.otlp_endpoint)
        models = self._models = build_models(settings)
        keyring = settings.keyring()
        self._app = assemble(settings, keyring, models, build_gate(settings, keyring, models), self._tracer)
        await models.start()
        self._telling = asyncio.create_task(self._tell(models), name="news")
        try:
            while models.state is not PoolState.READY:
                self.check(models)
                await asyncio.sleep(_LOOK_SECONDS)
        except ModelError:
            await self.stop()
            raise

    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        if self._models is not None:
            await self._models.stop()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.stop)

    async def serve(self, scope: Scope, receive: Receive, send: Send, key: Key | None = None) -> None:
        """Runs the application on an ASGI request. Without a `key`, it is read from the request's body."""
        assert self._app is not None, "start the replica first"

        async def on_answer(body: bytes) -> None:
            if scope["method"] == "POST":
                self._hot.use((key or await read_key(scope["path"], body)).blocks)

        watched = _Watched(receive, send, (REPLICA_HEADER, self.name.encode()), on_answer)
        self._num_open += 1
        try:
            await self._app(scope, watched.receive, watched.send)
        finally:
            self._num_open -= 1
            if watched.status not in _NOT_ADMITTED:
                for name, value in scope["headers"]:
                    if name == ROUTER_HEADER:
                        self._count_end(value.decode("latin-1"))

    async def answer(self, call: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Yields the application's answer as batches of ASGI messages. Closing the generator disconnects."""
        exchange = _Exchange(call)
        answering = asyncio.create_task(self._run(exchange), name=call.path)
        try:
            async for messages in exchange.messages():
                yield messages
        finally:
            exchange.hang_up()
            try:
                await asyncio.wait([answering], timeout=_END_SECONDS)
            finally:
                answering.cancel()

    async def answer_whole(self, call: ForwardedRequest) -> WholeAnswer:
        messages = [message async for some in self.answer(call) for message in some]
        start, body = messages[0], b"".join(message.get("body", b"") for message in messages[1:])
        return WholeAnswer(self.name, start["status"], tuple(start["headers"]), body)

    def check(self, models: Models | None = None) -> None:
        """Raises ModelError if what it serves has failed for good."""
        models = models or self._models
        if models is not None and models.state is PoolState.FAILED:
            reason = None if models.only is None else models.only.failure
            raise ModelError(reason or "The model cannot be served.")

    def report(self) -> Report:
        assert self._models is not None, "start the replica first"
        models, names = self._models, set[str]()
        loaded = {view.name for view in models.pool.touched() if view.service is not None}
        first = models.pool.catalog.default
        for spec in models.pool.catalog.specs():
            if (spec.base or spec.name) in loaded:
                names |= {spec.name, *models.names(spec)}
                if first is not None and spec.name == first.name:
                    names |= {ANY, *models.served_names}
        self._shrink(models)
        return Report(
            load=self._num_open,
            models=frozenset(names),
            num_models=len(loaded),
            is_ready=models.state is PoolState.READY,
            held=self._hot.held(),
            dropped=self._hot.dropped(),
        )

    def _shrink(self, models: Models) -> None:
        """Drops from the hot prefixes what the engines have no room for, or all if an engine is new."""
        services = [service for _, service in models.loaded()]
        pids = {service.engine_pid for service in services if service.engine_pid is not None}
        room = sum(_room(service.info, service.heartbeat) for service in services if service.info is not None)
        prompt_tokens = sum(service.heartbeat.counters.cache_queries for service in services)
        if self._engine_pids - pids or prompt_tokens < self._tokens_before:
            self._hot.forget()
            self._tokens_before = prompt_tokens
        elif prompt_tokens > self._tokens_before:
            self._hot.shrink(room * self._hot.total_blocks / (prompt_tokens - self._tokens_before))
        self._engine_pids = pids

    def facts(self) -> Facts:
        assert self._models is not None, "start the replica first"
        services = [service for _, service in self._models.loaded()]
        return Facts(
            replica=self.name,
            pid=os.getpid(),
            engine_pids=[service.engine_pid for service in services if service.engine_pid is not None],
            models=[name for name, _ in self._models.loaded()],
            requests=sum(service.num_requests for service in services),
            running=sum(service.heartbeat.running for service in services),
            waiting=sum(service.heartbeat.waiting for service in services),
        )

    def _count_end(self, router: str) -> None:
        self.finished[router] = self.finished.pop(router, 0) + 1
        if len(self.finished) > _MOST_ROUTERS:
            del self.finished[next(iter(self.finished))]

    async def _run(self, exchange: "_Exchange") -> None:
        try:
            await self.serve(exchange.call.scope(), exchange.receive, exchange.send, exchange.call.key)
        except Exception:  # noqa: BLE001  already answered; like any server, carry on with other requests
            structlog.stdlib.get_logger(__name__).exception("a fault of ours", path=exchange.call.path)
        finally:
            exchange.close()

    async def _tell(self, models: Models) -> None:
        news, log = News(models), structlog.stdlib.get_logger("ostro.server")
        while True:
            news.tell(log)
            await asyncio.sleep(_LOOK_SECONDS)


def _room(info: ModelInfo, heartbeat: Heartbeat) -> int:
    """Least number of tokens whose KV is cached: a page may be in several tiers, so the largest tier counts."""
    return max(info.num_pages, heartbeat.pages_host, heartbeat.pages_disk) * info.page_size


class _Watched:
    """A request on its way through: the answer gets one more header, and once it begins, `on_answer` gets the body."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        header: tuple[bytes, bytes],
        on_answer: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._receive = receive
        self._send = send
        self._header = header
        self._on_answer = on_answer
        self._body: list[bytes] | None = []
        self.status = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if self._body is not None and (part := message.get("body")):
            self._body.append(part)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        await self._send(message)
        # Done after the first bytes, which should not wait for this.
        if message["type"] == "http.response.body" and self._body is not None:
            body, self._body = b"".join(self._body), None
            if self.status == HTTPStatus.OK:
                await self._on_answer(body)


class _Exchange:
    """Both ends of one request: the application's `receive` and `send`, and the queue between them."""

    def __init__(self, call: ForwardedRequest) -> None:
        self.call = call
        self._taken = False
        self._gone = asyncio.Event()
        self._sent: deque[Message] = deque()
        self._news = asyncio.Event()
        self._closed = False

    async def receive(self) -> Message:
        if not self._taken:
            self._taken = True
            return {"type": "http.request", "body": self.call.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        self._sent.append(message)
        self._news.set()

    def hang_up(self) -> None:
        self._gone.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def messages(self) -> AsyncGenerator[list[Message], None]:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._sent:
                some = list(self._sent)
                self._sent.clear()
                yield some
            if self._closed and not self._sent:
                return

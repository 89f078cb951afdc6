"""One run of the server: binds the port, starts the models and the HTTP server, and drains on a signal. Knows processes
and signals; knows no endpoint.

    bind ──> listen, load ──> ready ──> signal: unready, new requests 503 ──> the last one has ended ──> exit 0
                  │                         │                                 or the window is over ──> exit 1
                  └── cannot load: exit 1   └── second signal: exit 128 + its number, at once
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Lifespan

from ostro.engine_process.messages import ModelInfo
from ostro.errors import BadRequest, ModelError, Unavailable
from ostro.pool.pool import PoolState
from ostro.processes.allocator import give_back_large_blocks
from ostro.processes.children import reap_orphans
from ostro.sampling_defaults import SamplingDefaults
from ostro.server.admission.auth import METRICS_PATH, OPEN_PATHS, Authentication, Keyring
from ostro.server.admission.limits import Gate, GateLimits
from ostro.server.app import build_app
from ostro.server.http.connections import Acceptor, Connections, most_connections, raise_file_limit
from ostro.server.http.protocol import BoundedHttp
from ostro.server.listing import Listing
from ostro.server.log.setup import LogFormat, PatientHandler, RequestLog, configure_logging, stderr_logged
from ostro.server.models.build import build_models, fixed_specs
from ostro.server.models.files import sweep_cache
from ostro.server.models.served import Models
from ostro.server.models.service import ModelService
from ostro.server.opening import Address, Opening
from ostro.server.playground.endpoint import PlaygroundEndpoint, read_assets
from ostro.server.settings import Merged, ServeSettings
from ostro.server.telemetry.metrics import Metrics, MetricsEndpoint
from ostro.server.telemetry.record import RequestRecord
from ostro.server.telemetry.tracing.start import TraceParent, Tracer, start_tracing
from ostro.version import __version__

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
# Far longer than a request takes from its arrival to the gate.
_ADMITTING_SECONDS = 0.25
# A head that takes longer comes from a stalled client, and shutdown does not wait for it.
_HEAD_SECONDS = 5.0
# Longer than common clients keep idle connections, so that they are the ones to close them.
_KEEP_ALIVE_SECONDS = 75
# Programs that start a server wait for its first log lines.
_FIRST_STATE_SECONDS, _STATE_SECONDS = 0.02, 0.25
# Time for responses to reach their clients once the engine is idle.
_LAST_BYTES_SECONDS = 1


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: connections wait in its backlog until the server accepts them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadRequest(f"Cannot listen on {host!r}: {error.strerror}. Check --host.", param="host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        message = f"Cannot listen on {host} port {port}: {error.strerror}."
        if error.errno == errno.EADDRINUSE:
            # Not a wrong setting: the port may be free in a moment.
            raise Unavailable(f"{message} Choose another with --port; 0 is any free one.") from error
        raise BadRequest(f"{message} Check --host and --port.", param="host") from error
    sock.setblocking(False)
    return sock


def serve(merged: Merged) -> int:
    """Serves until a signal; returns the exit status. Raises OstroError if it cannot start."""
    settings = merged.settings
    keyring = settings.keyring()
    connections = Connections(most_connections(settings.max_connections, raise_file_limit()))
    with _logging(settings) as log:
        sweep_cache()
        with (
            _tracing(settings) as tracer,
            bind(settings.host, settings.port) as sock,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            say = log.say if _log_format(settings) == "text" and sys.stderr.isatty() else None
            return runner.run(Server(merged, keyring, sock, connections, tracer, say=say).run())


@contextlib.contextmanager
def _logging(settings: ServeSettings) -> Iterator[PatientHandler]:
    """On exit, all log lines are written. JSON logs have standard error to themselves, unless a logging.yaml decides
    who writes there.
    """
    alone = _log_format(settings) == "json" and settings.logging_config is None
    log: PatientHandler | None = None
    try:
        with stderr_logged() if alone else contextlib.nullcontext(sys.stderr) as stream:
            log = _configured(settings, stream)
            yield log
    finally:
        if log is not None:
            log.flush()


def start_logging(merged: Merged) -> None:
    """For a server inside another program, which keeps its standard error."""
    _configured(merged.settings, sys.stderr)
    _tell_start(merged)


def _configured(settings: ServeSettings, stream: TextIO) -> PatientHandler:
    return configure_logging(
        level=settings.log_level,
        form=_log_format(settings),
        color=settings.color,
        config=settings.logging_config,
        stream=stream,
    )


def _log_format(settings: ServeSettings) -> LogFormat:
    if settings.log_format == "auto":
        return "text" if sys.stderr.isatty() else "json"
    return settings.log_format


def _tell_start(merged: Merged) -> None:
    """The first log lines: settings that are easily overlooked, and notes on ignored ones."""
    log = structlog.stdlib.get_logger("ostro.server")
    outside = merged.from_outside()
    log.info("starting", version=__version__, **({"settings": outside} if outside else {}))
    for note in merged.notes:
        log.info(note)


@contextlib.contextmanager
def _tracing(settings: ServeSettings) -> Iterator[Tracer | None]:
    """Wraps everything that may be traced; on exit, sends the last spans."""
    tracer = start_tracing(settings.otlp_endpoint)
    try:
        yield tracer
    finally:
        if tracer is not None:
            tracer.stop()


def _freeze_loaded() -> None:
    """Keeps the garbage collector from scanning what is loaded, all of which stays: that would hold up the event loop
    by some 100 ms in each full collection.
    """
    gc.collect()
    gc.freeze()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def middlewares(
    settings: ServeSettings, keyring: Keyring, metrics: Metrics, tracer: Tracer | None = None
) -> list[Middleware]:
    """The middleware stack, outermost first."""
    assets = read_assets() if settings.ui else {}
    quiet = {*OPEN_PATHS, METRICS_PATH, *assets}

    def on_end(record: RequestRecord) -> None:
        metrics.record(record)
        if tracer is not None and record.path not in quiet:
            tracer.record(record)

    return [
        Middleware(RequestLog, on_end=on_end, access_log=settings.access_log, quiet=quiet),
        *([Middleware(TraceParent)] if tracer is not None else []),
        # Outside authentication: a browser's preflight request carries no key.
        *([_cors(settings)] if settings.enable_cors else []),
        *([Middleware(PlaygroundEndpoint, assets=assets)] if assets else []),
        Middleware(
            Authentication,
            keyring=keyring,
            origins=settings.cors_origins if settings.enable_cors else (),
            hosts=settings.hosts(),
        ),
        Middleware(MetricsEndpoint, metrics=metrics),
    ]


def _cors(settings: ServeSettings) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_credentials=settings.cors_credentials,
        expose_headers=["x-request-id", "retry-after"],
    )


def build_gate(settings: ServeSettings, keyring: Keyring, models: Models) -> Gate:
    return Gate(
        settings.gate(),
        many_models=models.only is None,
        num_keys=keyring.num_callers,
        share_prefixes=settings.share_prefix_cache,
    )


def assemble(
    settings: ServeSettings,
    keyring: Keyring,
    models: Models,
    gate: Gate,
    tracer: Tracer | None = None,
    *,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """The app, configured by the settings."""
    options = settings.http()
    ledger = options.ledger(gate)
    return build_app(
        models,
        gate=gate,
        options=options,
        ledger=ledger,
        middlewares=middlewares(settings, keyring, Metrics(models, gate, ledger), tracer),
        lifespan=lifespan,
    )


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, because signals are handled here; and with a limit on connections."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None, "the caller passes listening sockets"
        await self.lifespan.startup()
        self.servers = [Acceptor(sock, self._protocol, self._connections) for sock in sockets]  # type: ignore[misc]
        self.started = True

    def end_keep_alive(self) -> bool:
        """Closes idle connections, and the others after their response: a client's next request opens a new one, which
        a load balancer sends to a server that accepts it. Returns whether there are others.
        """
        for connection in self._http():
            connection.end_keep_alive()
        return bool(self.server_state.tasks) or self.has_heads_arriving()

    def has_heads_arriving(self) -> bool:
        return any(connection.is_head_arriving() for connection in self._http())

    def _http(self) -> list[BoundedHttp]:
        return [each for each in self.server_state.connections if isinstance(each, BoundedHttp)]

    def _protocol(self) -> BoundedHttp:
        protocol = BoundedHttp(self.config, self.server_state, self.lifespan.state)
        protocol.peers = self._connections
        return protocol


class Server:
    """One run of the server, on a socket that is already listening."""

    def __init__(
        self,
        merged: Merged,
        keyring: Keyring,
        sock: socket.socket,
        connections: Connections,
        tracer: Tracer | None = None,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`say` prints to a user's terminal; None if there is none."""
        self._merged = merged
        self._settings = merged.settings
        self._say = say
        self._keyring = keyring
        self._sock = sock
        self._connections = connections
        self._tracer = tracer
        self._log = structlog.stdlib.get_logger("ostro.server")
        self._signalled = asyncio.Event()
        self._listing: Listing | None = None

    async def run(self) -> int:
        """Runs until a signal or until its model fails for good; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        _tell_start(self._merged)
        models = build_models(self._settings)
        gate = build_gate(self._settings, self._keyring, models)
        http = self._http(models, gate)
        await models.start()
        _freeze_loaded()
        give_back_large_blocks()
        serving = asyncio.create_task(http.serve(sockets=[self._sock]), name="http")
        address = Address(*self._sock.getsockname()[:2])
        opening = Opening(
            models,
            address,
            has_page=self._settings.ui,
            has_keys=bool(self._keyring.keys),
            say=self._say,
        )
        self._listing = self._listed(models, gate, address)
        try:
            return await self._until_over(models, gate, opening, http, serving)
        finally:
            await models.stop()
            http.should_exit = True
            await serving
            if self._listing is not None:
                self._listing.remove()

    def _listed(self, models: Models, gate: Gate, address: Address) -> Listing | None:
        if not self._settings.listed:
            return None
        try:
            return Listing(
                models,
                gate,
                url=address.local_url,
                has_keys=bool(self._keyring.keys),
                drain_seconds=self._settings.drain_timeout,
            )
        except RuntimeError:
            # This user has no home.
            return None

    def _http(self, models: Models, gate: Gate) -> HttpServer:
        return HttpServer(
            uvicorn.Config(
                assemble(self._settings, self._keyring, models, gate, self._tracer),
                http=BoundedHttp,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=self._settings.date_header,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
            ),
            self._connections,
        )

    async def _until_over(
        self, models: Models, gate: Gate, opening: Opening, http: HttpServer, serving: asyncio.Task[None]
    ) -> int:
        news = News(models)
        self._tell_listing()
        while not self._signalled.is_set():
            with contextlib.suppress(TimeoutError):
                pause = _STATE_SECONDS if opening.is_listening else _FIRST_STATE_SECONDS
                await asyncio.wait_for(self._signalled.wait(), pause)
            news.tell(self._log)
            opening.tell()
            self._tell_listing()
            reap_orphans()
            # A server with several models continues without one of them.
            if (only := models.only) is not None and only.failure is not None:
                raise ModelError(self._merged.in_users_words(only.failure))
            if serving.done():
                return 1
        listing = asyncio.create_task(self._tell_what_is_left(), name="listing")
        try:
            return await self._drained(models, gate, http)
        finally:
            listing.cancel()

    def _tell_listing(self, *, draining: bool = False) -> None:
        if self._listing is not None:
            self._listing.tell(draining=draining)

    async def _tell_what_is_left(self) -> None:
        while True:
            self._tell_listing(draining=True)
            await asyncio.sleep(_STATE_SECONDS)

    async def _drained(self, models: Models, gate: Gate, http: HttpServer) -> int:
        if http.end_keep_alive():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_HEAD_SECONDS, self._settings.drain_timeout)):
                    while http.has_heads_arriving():
                        await asyncio.sleep(_STATE_SECONDS)
            # Some requests may have arrived without being admitted yet.
            await asyncio.sleep(_ADMITTING_SECONDS)
        gate.drain()
        self._log.info("draining", requests=gate.num_inside, seconds=self._settings.drain_timeout)
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                # Servers that take over find the prefixes while requests here still run.
                sharing = asyncio.create_task(models.offer_all(), name="sharing prefixes")
                await gate.emptied()
                await sharing
        except TimeoutError:
            if not gate.num_inside:
                self._log.info("stopped before all prefixes were shared")
                return 0
            self._log.warning("requests cut off", requests=gate.num_inside)
            return 1
        self._log.info("stopped")
        return 0

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT and self._say is not None:
            # The terminal shows ^C at the cursor: start a new line.
            self._say("")
        if not self._signalled.is_set():
            self._signalled.set()
            return
        # A second signal means now, without an orderly shutdown. The engine exits when its socket closes.
        self._log.warning("aborted by a second signal")
        if self._listing is not None:
            self._listing.remove()
        logging.shutdown()
        os._exit(128 + number)


class News:
    """Logs every model that became ready, failed or restarted since the last call."""

    def __init__(self, models: Models, *, ends_with_only: bool = True) -> None:
        """`ends_with_only`: the failure of the only model ends the server, which logs its own message."""
        self._models = models
        self._ends_with_only = ends_with_only
        self._seen: dict[str, tuple[PoolState, int]] = {}

    def tell(self, log: structlog.stdlib.BoundLogger) -> None:
        for view in self._models.pool.touched():
            service = view.service
            state, restarts = self._seen.get(view.name, (PoolState.AVAILABLE, 0))
            now = 0 if service is None else service.restarts
            self._seen[view.name] = view.state, now
            if now > restarts:
                log.error("the engine exited and is being restarted", model=view.name, restarts=now)
            became_ready = view.state is PoolState.READY and state is not PoolState.READY
            if became_ready and service is not None and (info := service.info) is not None:
                own = service.sampling_defaults or SamplingDefaults()
                facts = _facts(self._models.shown(view.spec), info)
                log.info("ready", **facts, sampling_defaults=own.given, seconds=view.load_seconds)
            is_told = self._models.only is None or not self._ends_with_only
            if view.state is PoolState.FAILED and state is not PoolState.FAILED and is_told:
                log.error("the model cannot be served", model=view.name, reason=view.failure)


async def keep_telling(models: Models) -> None:
    """`Server`'s chores besides HTTP, for an app run by another server. Runs until cancelled."""
    news, log = News(models, ends_with_only=False), structlog.stdlib.get_logger("ostro.server")
    while True:
        news.tell(log)
        reap_orphans()
        await asyncio.sleep(_STATE_SECONDS)


def _facts(name: str, info: ModelInfo) -> dict[str, object]:
    return {
        "model": name,
        "backend": info.backend,
        "precision": info.precision,
        "max_seq_len": info.max_len,
        "pages": info.num_pages,
        "load_seconds": round(info.load_seconds, 3),
        "warm_up_seconds": round(info.warm_up_seconds, 3),
        "engine_bytes": info.resident_bytes,
    }


async def rehearse(settings: ServeSettings) -> str:
    """Loads and warms up the first model, and describes what serving it would look like."""
    from ostro.backends.choosing import check_without_torch

    specs = fixed_specs(settings)
    if not specs:
        raise BadRequest("--dry-run loads a model, and none was given. Name one with --model.", param="model")
    config = specs[0].config
    await asyncio.to_thread(check_without_torch, config.model, config)
    service = ModelService(config)
    await service.start()
    try:
        await service.settled()
        info = service.info
        assert info is not None
        return _report(service.name, info, settings.gate())
    finally:
        await service.stop()


def _report(name: str, info: ModelInfo, limits: GateLimits) -> str:
    lines = {
        "model": name,
        "runs on": f"{info.backend}, {info.precision}",
        "longest sequence": f"{info.max_len} tokens",
        "keys and values": f"{info.num_pages} pages of {info.page_size} tokens",
        "memory of the engine": f"{info.resident_bytes / (1 << 20):.0f} MiB",
        "load": f"{info.load_seconds:.2f} s",
        "warm-up": f"{info.warm_up_seconds:.2f} s",
        "at a time": f"{limits.concurrent} requests",
        "waiting": f"{limits.waiting} requests, {limits.waiting_tokens} tokens",
        "request timeout": f"{limits.seconds:g} s",
    }
    return "".join(f"{label + ':':<22}{value}\n" for label, value in lines.items())

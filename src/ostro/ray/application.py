"""The Ray Serve application, in one of two forms. Only assembles them.

Where Serve's ingress is HAProxy, requests go straight to the replicas' ports:

client ──HTTP──> HAProxy ──HTTP──> Engine replica ──socket──> engine process
                    └─ Picker      Ostro's whole HTTP         token ids
                       chooses     application

Elsewhere they go through Serve's proxy:

client ──HTTP──> Serve's proxy ──> Ingress ──calls──> Engine replica ──socket──> engine process
                                   reads the body,
                                   chooses
"""

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

from starlette.types import ASGIApp, Message

from ostro.system.requirements import needs

try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import RayServeException
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import LoggingConfig
except ImportError as error:
    raise ImportError(needs("ostro.ray", "ray")) from error

from ostro.errors import BadRequest
from ostro.ray.direct import DirectReplica, Picking
from ostro.ray.forwarded_request import ForwardedRequest
from ostro.ray.ingress import Answering, Ingress
from ostro.ray.options import RayOptions, devices_of, explicit, goes_direct, hard_stop_seconds, read_options, threads_of
from ostro.ray.replica import EngineReplica, Facts, WholeAnswer
from ostro.ray.router import (
    DIRECT_STATS_SECONDS,
    FINISHED,
    REPORT,
    STATS_SECONDS,
    DirectRouter,
    PrefixRouter,
    router_name,
)
from ostro.routing.key import Key
from ostro.server.http.protocol import bound_uvicorn
from ostro.server.log.setup import LogFormat, configure_logging
from ostro.server.settings import Given, ServeSettings, read_settings

ENGINE, INGRESS, PICKER = "Engine", "Ingress", "Picker"

_HEALTH_SECONDS = 5.0
# On top of the requests that admission lets wait and run: probes and refusals, which bypass it.
_SPARE_REQUESTS = 256
_ASK_ALL_SECONDS = 120.0
_BATCH, _GPU_BATCH = 64, 256

_log = logging.getLogger(__name__)


class Engine:
    """The deployment class of `EngineReplica`, with the methods that Serve calls."""

    async def __init__(self, given: Mapping[str, Given]) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._replica = EngineReplica(given, context.replica_id.unique_id)
        settings = self._replica.settings
        form: LogFormat = "text" if settings.log_format == "text" else "json"
        configure_logging(level=settings.log_level, form=form, color=settings.color, config=settings.logging_config)
        await self._replica.start()

    async def answer(self, call: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        # Closed together with this generator: a disconnect must not wait for the garbage collector.
        async with aclosing(self._replica.answer(call)) as answers:
            async for messages in answers:
                yield messages

    async def answer_whole(self, call: ForwardedRequest) -> WholeAnswer:
        return await self._replica.answer_whole(call)

    async def facts(self) -> Facts:
        return self._replica.facts()

    async def check_health(self) -> None:
        self._replica.check()

    async def record_routing_stats(self) -> dict[str, object]:
        return {REPORT: self._replica.report().to_builtins(), FINISHED: dict(self._replica.finished)}

    async def __del__(self) -> None:
        if (replica := getattr(self, "_replica", None)) is not None:
            await replica.stop()


class DirectEngine(Engine):
    """An engine replica that is its own ingress: HAProxy sends requests straight to its port."""

    async def __init__(self, given: Mapping[str, Given]) -> None:  # type: ignore[misc]  # Serve awaits it
        # Serve starts the replica's HTTP server, once this has returned.
        bound_uvicorn()
        await super().__init__(given)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        engines = serve.get_deployment_handle(ENGINE, serve.get_replica_context().app_name)
        settings = self._replica.settings
        return DirectReplica(
            self._replica,
            _Handles(engines),
            settings.keyring(),
            settings.http().body,
            hosts=settings.hosts(),
            num_places=settings.gate().num_places,
        )


class Picker:
    """Tells HAProxy which replica a request goes to."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines
        # Now rather than at the first request.
        engines._init()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Picking(self._pick, router_name())

    async def _pick(self, key: Key) -> str | None:
        try:
            # Nothing is reserved: the request goes to the replica by another way.
            async with self._engines.choose_replica(key, _reserve=False) as selection:
                return str(selection._replica.replica_id.to_full_id_str())
        except RayServeException:
            return None


class Front:
    """The deployment class of `Ingress`, over a handle to the engines."""

    def __init__(self, engines: DeploymentHandle, given: Mapping[str, Given]) -> None:
        self._engines = engines
        self._settings = read_settings(given).settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        settings = self._settings
        return Ingress(
            _Handles(self._engines),
            settings.keyring(),
            settings.http().body,
            request_seconds=settings.request_timeout,
            hosts=settings.hosts(),
            num_places=settings.gate().num_places,
        )


class _Handles:
    faults = (RayError, RayServeException)

    def __init__(self, engines: DeploymentHandle) -> None:
        self._one = engines.options(stream=True)
        self._all = engines

    def ask(self, call: ForwardedRequest) -> Answering:
        answering: Answering = self._one.answer.remote(call)
        return answering

    def ask_all(self, call: ForwardedRequest) -> Awaitable[Sequence[WholeAnswer | BaseException]]:
        asked = self._all.broadcast("answer_whole", call)
        answers: Awaitable[Sequence[WholeAnswer | BaseException]] = asked.results_async(
            timeout_s=_ASK_ALL_SECONDS, return_exceptions=True
        )
        return answers


def build(args: Mapping[str, object]) -> serve.Application:
    """For `serve run deploy.ray:build NAME=VALUE …`: takes server settings and RayOptions."""
    options, merged = read_options(args)
    is_direct = goes_direct(options, os.environ)
    for name in ("host", "port"):
        if (origin := merged.chosen(name)) is not None:
            _log.warning("%s from %s is ignored: Ray Serve decides it.", name, origin)
    given = explicit(merged)
    settings = merged.settings
    if is_direct and (seconds := hard_stop_seconds(os.environ)) < settings.request_timeout:
        _log.warning(
            "HAProxy cuts off streams %g seconds after replicas come or go, but request_timeout is %g seconds. Set "
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S to at least that.",
            seconds,
            settings.request_timeout,
        )
    if (threads := threads_of(options, settings)) is not None:
        given.setdefault("threads", Given(threads, "cpus"))
    gate = settings.gate()
    room = gate.concurrent + gate.waiting + _SPARE_REQUESTS
    most = options.max_replicas or options.replicas
    # A replica being removed finishes its requests, none of which takes longer than the request timeout.
    end_seconds = settings.drain_timeout if "drain_timeout" in given else settings.request_timeout
    engine = serve.deployment(
        name=ENGINE,
        ray_actor_options={"num_cpus": options.cpus, **devices_of(options, settings)},
        max_ongoing_requests=room,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=end_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=_routing(options, is_direct=is_direct),
        # The application writes its own access log.
        logging_config=LoggingConfig(enable_access_log=False),
        **_replicas(options, settings),
    )
    if is_direct:
        engines = engine(serve.ingress()(DirectEngine)).bind(given)
        picker = serve.deployment(
            name=PICKER,
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=room * most,
            logging_config=LoggingConfig(enable_access_log=False),
        )(serve.ingress()(Picker))
        return _with_router(engines, picker.bind(engines))
    ingress = serve.deployment(
        name=INGRESS,
        ray_actor_options={"num_cpus": 0},
        num_replicas=options.ingress_replicas,
        max_ongoing_requests=room * most,
        graceful_shutdown_timeout_s=end_seconds,
    )(serve.ingress()(Front))
    return ingress.bind(engine(Engine).bind(given), given)


def _with_router(engines: serve.Application, picker: serve.Application) -> serve.Application:
    """HAProxy asks `picker` for each request's replica. Ray has no public name for this yet."""
    attach: Callable[[serve.Application], serve.Application] | None = getattr(
        engines, "_with_ingress_request_router", None
    )
    if attach is None:
        raise BadRequest(
            f"Ray {ray.__version__} chooses replicas for HAProxy in a way that this version of Ostro does not know. "
            "Install Ray 2.60, or unset RAY_SERVE_ENABLE_HA_PROXY."
        )
    return attach(picker)


def _replicas(options: RayOptions, settings: ServeSettings) -> dict[str, object]:
    if options.max_replicas is None:
        return {"num_replicas": options.replicas}
    batch = settings.engine().max_batch_seqs or (_GPU_BATCH if devices_of(options, settings)["num_gpus"] else _BATCH)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=options.max_replicas,
            # Serve counts requests that wait or run in the engine as ongoing: each is an open request.
            target_ongoing_requests=options.target_requests or max(1.0, batch / 2),
            upscale_delay_s=options.upscale_delay,
            downscale_delay_s=options.downscale_delay,
            look_back_period_s=options.look_back,
        )
    }


def _routing(options: RayOptions, *, is_direct: bool) -> RequestRouterConfig:
    if options.routing == "prefix":
        router = DirectRouter if is_direct else PrefixRouter
        return RequestRouterConfig(
            request_router_class=f"{router.__module__}:{router.__name__}",
            request_routing_stats_period_s=DIRECT_STATS_SECONDS if is_direct else STATS_SECONDS,
        )
    if options.routing == "round_robin":
        return RequestRouterConfig(request_router_class="ray.serve.experimental.round_robin_router:RoundRobinRouter")
    return RequestRouterConfig()

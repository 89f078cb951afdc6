"""Prometheus metrics: under vLLM's names, so that its dashboards work, and our own under `ostro_`. Knows records and
the engines' heartbeats; knows no requests.

Gauges and the engines' counters are read from the models on each scrape; histograms and successes are updated as
requests end. No counter ever decreases, and an unloaded model keeps its own.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.engine.counters import Counters
from ostro.engine_process.messages import Heartbeat, ModelInfo
from ostro.server.admission.auth import METRICS_PATH
from ostro.server.telemetry.record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# Labels for paths without a route: 404, 405 and requests rejected before routing.
_NO_ROUTE = {404: "not_found", 405: "method_not_allowed"}
_OTHER = "other"


class Served(Protocol):
    """The metrics' view of a model service."""

    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def heartbeat(self) -> Heartbeat: ...


class ServedModels(Protocol):
    """The metrics' view of the models."""

    @property
    def first_name(self) -> str:
        """The label for requests that name no model."""

    @property
    def num_loads(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def num_load_failures(self) -> int: ...
    def loaded(self) -> Sequence[tuple[str, Served]]:
        """Each with its name in responses."""

    def totals(self) -> Sequence[tuple[str, Counters]]:
        """Engine counters, including those of stopped engines, by the same names."""


class GateView(Protocol):
    """The metrics' view of the gate."""

    num_waiting: int
    num_inside: int


class LedgerView(Protocol):
    """The metrics' view of the ledger."""

    def held(self) -> Mapping[str, int]:
        """Bytes by what they are held for."""


class Metrics:
    def __init__(self, models: ServedModels, line: GateView, ledger: LedgerView) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Live(models, line, ledger))
        self._models = models
        self._seconds = self._histogram("vllm:e2e_request_latency_seconds", "Time of a whole request.", _LONG_SECONDS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to a stream's first token.", _SECONDS)
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Mean time between tokens.", _TOKEN_SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time until the engine ran it.", _LONG_SECONDS)
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that the engine took.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter("vllm:request_success", "Choices that have finished.", "finished_reason")
        self._http = self._counter("ostro_http_requests", "Responses by status.", "path", "status")

    def render(self) -> bytes:
        """The Prometheus exposition; its content type is CONTENT_TYPE."""
        return generate_latest(self.registry)

    def record(self, record: RequestRecord) -> None:
        """Records a finished request."""
        name = record.model or self._models.first_name
        self._http.labels(name, _path_label(record), str(record.status or "gone")).inc()
        if record.prompt_tokens is None or record.admitted_at is None:
            return
        self._prompt.labels(name).inc(record.prompt_tokens)
        self._generated.labels(name).inc(record.completion_tokens)
        for reason in record.finish_reasons:
            self._success.labels(name, reason).inc()
        self._seconds.labels(name).observe(record.seconds)
        _observe(self._queue.labels(name), record.queue_seconds)
        _observe(self._ttft.labels(name), record.ttft_seconds)
        if record.first_token is not None and record.last_token is not None and record.completion_tokens > 1:
            gap = (record.last_token - record.first_token) / (record.completion_tokens - 1)
            _observe(self._gap.labels(name), gap if record.stream else None)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self.registry)


def _path_label(record: RequestRecord) -> str:
    """Never the path itself: anyone can make those up, and labels are kept forever."""
    if record.route is None or record.status == 405:
        return _NO_ROUTE.get(record.status or 0, _OTHER)
    return record.route


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)


_GAUGES: Sequence[tuple[str, str, Callable[[Heartbeat], float]]] = (
    ("vllm:num_requests_running", "Sequences that the engine runs.", lambda beat: beat.running),
    ("vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", lambda beat: _used(beat)),
    ("ostro_pages_total", "Pages of the KV cache.", lambda beat: beat.pages_total),
    ("ostro_pages_free", "Pages that are free.", lambda beat: beat.pages_free),
    ("ostro_pages_cached", "Pages of cached prefixes that are not in use.", lambda beat: beat.pages_cached),
    ("ostro_pages_host", "Pages of cached prefixes in host memory, below a GPU.", lambda beat: beat.pages_host),
    ("ostro_pages_disk", "Pages of cached prefixes on disk.", lambda beat: beat.pages_disk),
    ("ostro_pages_shared", "Pages that other engines find as well.", lambda beat: beat.pages_shared),
    ("ostro_states_total", "Slots for recurrent states.", lambda beat: beat.states_total),
    ("ostro_states_free", "Slots for states that are free.", lambda beat: beat.states_free),
    ("ostro_states_cached", "States kept for prefix hits.", lambda beat: beat.snapshots),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[Counters], float]]] = (
    ("vllm:num_preemptions", "Sequences that were preempted.", lambda totals: totals.preemptions),
    ("ostro_resumed", "Preempted sequences that resumed with their state.", lambda totals: totals.resumed),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda totals: totals.cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found there.", lambda totals: totals.cache_hits),
    ("ostro_stateless_tokens", "Those found without their state, and computed again.", lambda t: t.stateless_tokens),
    ("ostro_pages_stored", "Pages copied to host memory when evicted.", lambda totals: totals.stored_pages),
    ("ostro_pages_spilled", "Pages handed on to be written to disk.", lambda totals: totals.spilled_pages),
    ("ostro_pages_fetched_host", "Pages fetched from host memory.", lambda totals: totals.fetched_pages),
    ("ostro_pages_fetched_disk", "Pages fetched from disk.", lambda totals: totals.fetched_disk_pages),
    ("ostro_pages_lost", "Pages on disk that were found damaged.", lambda totals: totals.lost_pages),
    ("ostro_pages_offered", "Pages shared with other engines.", lambda totals: totals.offered_pages),
    ("ostro_states_stored", "States copied to host memory.", lambda totals: totals.stored_states),
    ("ostro_states_spilled", "States handed on to be written to disk.", lambda totals: totals.spilled_states),
    ("ostro_states_fetched", "States fetched from host memory and disk.", lambda totals: totals.fetched_states),
    ("ostro_remote_prefills", "Prompts sent to another server to compute.", lambda totals: totals.remote_prefills),
    ("ostro_remote_prefills_failed", "Those that it did not compute.", lambda totals: totals.failed_prefills),
    ("ostro_page_fetch_seconds", "Time that fetching pages took.", lambda totals: totals.fetch_seconds),
    ("ostro_engine_steps", "Steps of the engine.", lambda totals: totals.steps),
    ("ostro_computed_tokens", "Tokens computed, prompts and outputs.", lambda totals: totals.computed_tokens),
    ("ostro_sampled_tokens", "Tokens sampled, aborted requests included.", lambda totals: totals.sampled_tokens),
    ("ostro_forced_tokens", "Tokens that the grammar determined.", lambda totals: totals.forced_tokens),
    (
        "ostro_drafted_tokens",
        "Tokens that were guessed and then verified.",
        lambda totals: totals.drafted_tokens,
    ),
    ("ostro_accepted_tokens", "Drafted tokens that were right.", lambda totals: totals.accepted_tokens),
    ("ostro_outer_steps", "Outer steps of an HRM.", lambda totals: totals.outer_steps),
    ("ostro_outer_steps_saved", "Outer steps that halting early has saved.", lambda totals: totals.saved_steps),
    ("ostro_compile_seconds", "Time spent compiling programs.", lambda totals: totals.compile_seconds),
    ("ostro_recompiles", "Programs compiled after the model was ready.", lambda totals: totals.recompiles),
    ("ostro_engine_restarts", "Number of times the engine was restarted.", lambda totals: totals.restarts),
)
_LOADED: Sequence[tuple[str, str, Callable[[ModelInfo], float]]] = (
    ("ostro_load_seconds", "Time to load the model.", lambda info: info.load_seconds),
    ("ostro_warm_up_seconds", "Time to warm it up.", lambda info: info.warm_up_seconds),
    ("ostro_programs", "Programs compiled while it was loaded.", lambda info: info.num_programs),
    ("ostro_devices", "Devices that the model is divided over.", lambda info: info.devices),
    ("ostro_engine_resident_bytes", "Memory of the engine once warm.", lambda info: info.resident_bytes),
)


def _used(beat: Heartbeat) -> float:
    return (beat.pages_total - beat.pages_free - beat.pages_cached) / (beat.pages_total or 1)


class _Live(Collector):
    """Reads the models on each scrape."""

    def __init__(self, models: ServedModels, line: GateView, ledger: LedgerView) -> None:
        self._models = models
        self._line = line
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        loaded, totals = dict(self._models.loaded()), dict(self._models.totals())
        beats = {name: service.heartbeat for name, service in loaded.items()}
        waiting = "vllm:num_requests_waiting", "Requests that wait to run."
        # Requests waiting at the gate are not assigned to an engine yet.
        at_gate = {self._models.first_name: self._line.num_waiting}
        in_engine = {name: beat.waiting for name, beat in beats.items()}
        both = {name: at_gate.get(name, 0) + in_engine.get(name, 0) for name in at_gate | in_engine}
        yield _family(GaugeMetricFamily, *waiting, both)
        for name, text, read in _GAUGES:
            yield _family(GaugeMetricFamily, name, text, {model: read(beat) for model, beat in beats.items()})
        for name, text, count in _COUNTERS:
            yield _family(CounterMetricFamily, name, text, {model: count(each) for model, each in totals.items()})
        infos = {name: service.info for name, service in loaded.items()}
        for name, text, of in _LOADED:
            values = {model: of(info) for model, info in infos.items() if info is not None}
            yield _family(GaugeMetricFamily, name, text, values)
        yield from _described(infos)
        yield GaugeMetricFamily("ostro_requests_under_way", "HTTP requests inside the gate.", self._line.num_inside)
        held = GaugeMetricFamily("ostro_held_bytes", "Memory that requests hold in the API process.", labels=["kind"])
        for kind, size in self._ledger.held().items():
            held.add_metric([kind], size)
        yield held
        yield GaugeMetricFamily("ostro_models_loaded", "Models that have an engine.", len(loaded))
        yield CounterMetricFamily("ostro_model_loads", "Models loaded.", self._models.num_loads)
        yield CounterMetricFamily("ostro_model_evictions", "Models unloaded to make room.", self._models.num_evictions)
        failures = self._models.num_load_failures
        yield CounterMetricFamily("ostro_model_load_failures", "Loads that failed.", failures)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, values: Mapping[str, float]
) -> Metric:
    family = kind(name, text, labels=["model_name"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


def _described(infos: Mapping[str, ModelInfo | None]) -> Iterator[Metric]:
    """Facts as labels, as endpoint pickers of Kubernetes' inference gateways read them."""
    sizes = GaugeMetricFamily(
        "vllm:cache_config_info", "Sizes of the KV cache.", labels=["model_name", "block_size", "num_gpu_blocks"]
    )
    labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters, and the time of this report.", labels=labels)
    for model, info in infos.items():
        if info is None:
            continue
        if info.keeps_kv:
            sizes.add_metric([model, str(info.page_size), str(info.num_pages)], 1)
        if info.adapters:
            # All of them are loaded, and any number may share a step: none ever waits for another's place.
            adapters.add_metric([model, str(len(info.adapters)), ",".join(info.adapters), ""], time.time())
    yield sizes
    yield adapters


class MetricsEndpoint:
    """ASGI middleware, inside authentication: answers GET /metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == METRICS_PATH and scope["method"] in ("GET", "HEAD"):
            record = scope.get("state", {}).get("record")
            if isinstance(record, RequestRecord):
                record.route = METRICS_PATH
            await Response(self.metrics.render(), media_type=CONTENT_TYPE)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

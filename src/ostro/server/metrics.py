"""What Prometheus reads: vLLM's names, so that boards made for it work, and our own under `ostro_`. Knows records and
the engines' pulses; knows no requests.

Gauges and the engines' counters are read from the models when somebody asks; histograms and successes are fed as
requests end. An engine counts from zero after a restart or another load; what it had counted before is kept here.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.engine.messages import ModelInfo, Pulse
from ostro.server.auth import METRICS_PATH
from ostro.server.logging import RequestRecord

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


_NAMED_PATHS = tuple(
    (re.compile(pattern), label)
    for pattern, label in (
        (r"/v1/(?!chat/).+/chat/completions", "/v1/{model}/chat/completions"),
        (r"/v1/(?!chat/).+/completions", "/v1/{model}/completions"),
        (r"/v1/models/.+", "/v1/models/{model}"),
        (r"/admin/load/.+", "/admin/load/{model}"),
        (r"/admin/unload/.+", "/admin/unload/{model}"),
        (r"/admin/pin/.+", "/admin/pin/{model}"),
        (r"/admin/unpin/.+", "/admin/unpin/{model}"),
    )
)


class Served(Protocol):
    """What metrics read of a model service."""

    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def pulse(self) -> Pulse: ...
    @property
    def restarts(self) -> int: ...


class Fleet(Protocol):
    """What metrics read of the models."""

    @property
    def first_name(self) -> str:
        """For requests that name no model."""

    @property
    def num_loads(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    def loaded(self) -> Sequence[tuple[str, Served]]:
        """Each with its name in answers."""


class Line(Protocol):
    """What metrics read of the gate."""

    num_waiting: int
    num_inside: int


@dataclass(slots=True)
class Totals:
    """The engine's counters over all its lives."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    def plus(self, pulse: Pulse) -> "Totals":
        return Totals(**{each.name: getattr(self, each.name) + getattr(pulse, each.name) for each in fields(self)})


class Metrics:
    def __init__(self, fleet: Fleet, line: Line) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Live(fleet, line))
        self._fleet = fleet
        self._seconds = self._histogram("vllm:e2e_request_latency_seconds", "Time of a whole request.", _LONG_SECONDS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to a stream's first token.", _SECONDS)
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Mean time between tokens.", _TOKEN_SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time in line for the engine.", _LONG_SECONDS)
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that the engine took.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter("vllm:request_success", "Choices that came to their end.", "finished_reason")
        self._http = self._counter("ostro_http_requests", "Answers by status.", "path", "status")

    def render(self) -> bytes:
        """The text that Prometheus reads; CONTENT_TYPE goes with it."""
        return generate_latest(self.registry)

    def record(self, record: RequestRecord) -> None:
        """Takes in a request that is over."""
        name = record.model or self._fleet.first_name
        # A path that nobody serves is anyone's to make up: it must not become a label.
        known = record.status not in (None, 401, 404, 405) and record.method in ("GET", "POST")
        path = _without_name(record.path) if known else "other"
        self._http.labels(name, path, str(record.status or "gone")).inc()
        if record.prompt_tokens is None or record.let_in is None:
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


def _without_name(path: str) -> str:
    """A model's name in a path is anyone's to make up too."""
    for pattern, label in _NAMED_PATHS:
        if pattern.fullmatch(path):
            return label
    return path


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)


@dataclass(slots=True)
class _Life:
    """A model's counters over all its engines."""

    before: Totals = field(default_factory=Totals)
    last: Pulse = field(default_factory=Pulse)
    restarts: int = 0

    def totals(self, service: Served) -> Totals:
        """A counter must never fall: what an engine had counted is kept when the next one starts from zero."""
        pulse = service.pulse
        if service.restarts != self.restarts or pulse.steps < self.last.steps:
            self.before = self.before.plus(self.last)
            self.restarts = service.restarts
        self.last = pulse
        return self.before.plus(pulse)

    def lose(self) -> None:
        """The engine is gone, and another may come."""
        self.before, self.last, self.restarts = self.before.plus(self.last), Pulse(), 0


@dataclass(frozen=True, slots=True)
class _Look:
    """One model, as it is now."""

    name: str
    service: Served
    pulse: Pulse
    totals: Totals


_Reading = tuple[str, str, Callable[[_Look], float]]

_GAUGES: Sequence[_Reading] = (
    ("vllm:num_requests_running", "Sequences that the engine runs.", lambda look: look.pulse.running),
    ("vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", lambda look: _used(look.pulse)),
    ("ostro_pages_total", "Pages of keys and values.", lambda look: look.pulse.pages_total),
    ("ostro_pages_free", "Pages that hold nothing.", lambda look: look.pulse.pages_free),
    ("ostro_pages_cached", "Pages that hold a prefix which nobody uses now.", lambda look: look.pulse.pages_cached),
)
_COUNTERS: Sequence[_Reading] = (
    ("vllm:num_preemptions", "Sequences that gave up their pages.", lambda look: look.totals.preemptions),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the cache.",
        lambda look: look.totals.cache_queries,
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens found there.", lambda look: look.totals.cache_hits),
    ("ostro_engine_steps", "Steps of the engine.", lambda look: look.totals.steps),
    ("ostro_computed_tokens", "Tokens computed, prompts and outputs.", lambda look: look.totals.computed_tokens),
    ("ostro_sampled_tokens", "Tokens sampled, aborted requests included.", lambda look: look.totals.generated_tokens),
    ("ostro_engine_restarts", "Times the engine was started anew.", lambda look: look.service.restarts),
)
_LOADED: Sequence[tuple[str, str, Callable[[ModelInfo], float]]] = (
    ("ostro_load_seconds", "Time to load the model.", lambda info: info.load_seconds),
    ("ostro_warm_up_seconds", "Time to warm it up.", lambda info: info.warm_up_seconds),
    ("ostro_engine_resident_bytes", "Memory of the engine once warm.", lambda info: info.resident_bytes),
)


def _used(pulse: Pulse) -> float:
    return (pulse.pages_total - pulse.pages_free - pulse.pages_cached) / (pulse.pages_total or 1)


class _Live(Collector):
    """Reads the models when asked."""

    def __init__(self, fleet: Fleet, line: Line) -> None:
        self._fleet = fleet
        self._line = line
        self._lives: defaultdict[str, _Life] = defaultdict(_Life)

    def collect(self) -> Iterator[Metric]:
        loaded = dict(self._fleet.loaded())
        for name in self._lives.keys() - loaded.keys():
            self._lives[name].lose()
        looks = [
            _Look(name, service, service.pulse, self._lives[name].totals(service)) for name, service in loaded.items()
        ]
        waiting = "vllm:num_requests_waiting", "Requests that wait to run."
        # Who waits at the gate waits for no engine in particular.
        first = self._fleet.first_name
        at_gate = {first: self._line.num_waiting} | {look.name: 0 for look in looks if look.name != first}
        in_engine = {look.name: look.pulse.waiting for look in looks}
        yield _family(GaugeMetricFamily, *waiting, {name: at_gate[name] + in_engine.get(name, 0) for name in at_gate})
        for kind, readings in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, read in readings:
                yield _family(kind, name, text, {look.name: read(look) for look in looks})
        infos = {look.name: look.service.info for look in looks}
        for name, text, of in _LOADED:
            values = {model: of(info) for model, info in infos.items() if info is not None}
            yield _family(GaugeMetricFamily, name, text, values)
        yield GaugeMetricFamily("ostro_requests_under_way", "HTTP requests inside the gate.", self._line.num_inside)
        yield GaugeMetricFamily("ostro_models_loaded", "Models that have an engine.", len(looks))
        yield CounterMetricFamily("ostro_model_loads", "Models loaded.", self._fleet.num_loads)
        yield CounterMetricFamily("ostro_model_evictions", "Models that made room.", self._fleet.num_evictions)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, values: Mapping[str, float]
) -> Metric:
    family = kind(name, text, labels=["model_name"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family


class MetricsEndpoint:
    """ASGI middleware, within the one that asks for keys: answers GET /metrics."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == METRICS_PATH and scope["method"] in ("GET", "HEAD"):
            await Response(self.metrics.render(), media_type=CONTENT_TYPE)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

"""What Prometheus reads: vLLM's names, so that boards made for it work, and our own under `ostro_`. Knows records and
the engine's pulse; knows no requests.

Gauges and the engine's counters are read from the model when somebody asks; histograms and successes are fed as
requests end. The engine counts from zero after a restart; what it had counted before is kept here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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


class Served(Protocol):
    """What metrics read of a model service."""

    @property
    def name(self) -> str: ...
    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def pulse(self) -> Pulse: ...
    @property
    def restarts(self) -> int: ...
    @property
    def num_requests(self) -> int: ...


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
    def __init__(self, service: Served, line: Line) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Live(service, line))
        self._service = service
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
        name = self._service.name
        # A path that nobody serves is anyone's to make up: it must not become a label.
        known = record.status not in (None, 401, 404, 405) and record.method in ("GET", "POST")
        path = record.path if known else "other"
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


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)


class _Live(Collector):
    """Reads the service when asked."""

    def __init__(self, service: Served, line: Line) -> None:
        self._service = service
        self._line = line
        self._before = Totals()
        self._last = Pulse()
        self._restarts = 0

    def collect(self) -> Iterator[Metric]:
        service, pulse = self._service, self._service.pulse
        totals = self._totals(pulse)
        used = pulse.pages_total - pulse.pages_free - pulse.pages_cached
        gauge, counter = _family(GaugeMetricFamily, service.name), _family(CounterMetricFamily, service.name)
        yield gauge("vllm:num_requests_running", "Sequences that the engine runs.", pulse.running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait to run.", pulse.waiting + self._line.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", used / (pulse.pages_total or 1))
        yield counter("vllm:num_preemptions", "Sequences that gave up their pages.", totals.preemptions)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.cache_queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found there.", totals.cache_hits)
        yield gauge("ostro_requests_under_way", "HTTP requests inside the gate.", self._line.num_inside)
        yield gauge("ostro_pages_total", "Pages of keys and values.", pulse.pages_total)
        yield gauge("ostro_pages_free", "Pages that hold nothing.", pulse.pages_free)
        yield gauge("ostro_pages_cached", "Pages that hold a prefix which nobody uses now.", pulse.pages_cached)
        yield counter("ostro_engine_steps", "Steps of the engine.", totals.steps)
        yield counter("ostro_computed_tokens", "Tokens computed, prompts and outputs.", totals.computed_tokens)
        yield counter("ostro_sampled_tokens", "Tokens sampled, aborted requests included.", totals.generated_tokens)
        yield counter("ostro_engine_restarts", "Times the engine was started anew.", service.restarts)
        if (info := service.info) is not None:
            yield gauge("ostro_load_seconds", "Time to load the model.", info.load_seconds)
            yield gauge("ostro_warm_up_seconds", "Time to warm it up.", info.warm_up_seconds)
            yield gauge("ostro_engine_resident_bytes", "Memory of the engine once warm.", info.resident_bytes)

    def _totals(self, pulse: Pulse) -> Totals:
        """A counter must never fall: what an engine had counted is kept when the next one starts from zero."""
        if self._service.restarts != self._restarts or pulse.steps < self._last.steps:
            self._before = self._before.plus(self._last)
            self._restarts = self._service.restarts
        self._last = pulse
        return self._before.plus(pulse)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], model: str
) -> Callable[[str, str, float], Metric]:
    def made(name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([model], value)
        return family

    return made


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

"""Creates spans of finished requests, and sends them from a background thread. Imports opentelemetry, so import this
module only if requests are traced.
"""

import logging
import threading
import time
from collections.abc import Sequence
from importlib import metadata

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ostro.server.telemetry.record import RequestRecord
from ostro.server.telemetry.tracing.spans import attributes_of, error_type, is_failure, name_of, phases_of

# How long shutdown waits for the last spans to be sent, and how often a failing collector is logged.
_FLUSH_SECONDS = 1.0
_COMPLAINT_SECONDS = 60.0


class OtlpTracer:
    """Use within one thread; only `stop` blocks."""

    def __init__(self, url: str) -> None:
        """Spans are posted to `url`."""
        self._exporter = _QuietExporter(OTLPSpanExporter(url))
        # No shutdown at exit: the library's own would wait too long for a dead collector.
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._spans = self._provider.get_tracer("ostro", metadata.version("ostro"))
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord) -> None:
        """Records a finished request; stores its trace id in the record."""
        epoch = time.time_ns() - time.monotonic_ns()
        span = self._spans.start_span(
            name_of(record),
            self._parent(record),
            kind=SpanKind.SERVER,
            attributes=attributes_of(record),
            start_time=epoch + _nanoseconds(record.started),
        )
        own = span.get_span_context()
        if own.is_valid:
            record.trace_id, record.span_id = f"{own.trace_id:032x}", f"{own.span_id:016x}"
        if not span.is_recording():
            return
        if is_failure(record):
            span.set_status(Status(StatusCode.ERROR, error_type(record)))
        within = set_span_in_context(span, Context())
        for phase in phases_of(record):
            part = self._spans.start_span(
                phase.name, within, attributes=phase.attributes, start_time=epoch + _nanoseconds(phase.start)
            )
            part.end(epoch + _nanoseconds(phase.end))
        span.end(epoch + _nanoseconds(record.ended or time.monotonic()))

    def stop(self) -> None:
        """Sends the remaining spans, for a limited time."""
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        if flushing.is_alive():
            self._exporter.shutdown()

    def _parent(self, record: RequestRecord) -> Context:
        given = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        headers = {name: value for name, value in given.items() if value is not None}
        return self._propagator.extract(headers, Context())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _resource() -> Resource:
    """OpenTelemetry's environment variables take precedence."""
    ours = {"service.name": "ostro", "service.version": metadata.version("ostro")}
    given = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in ours.items() if name not in given})


class _QuietExporter(SpanExporter):
    """Logs at most once a minute that spans are lost, and why; the library would log several lines per batch."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._log = structlog.stdlib.get_logger("ostro.tracing")
        self._complaint = _LastError()
        self._told_at = float("-inf")
        self._num_lost = 0
        self._is_over = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS and not self._is_over:
            self._num_lost += len(spans)
            if time.monotonic() - self._told_at >= _COMPLAINT_SECONDS:
                self._told_at = time.monotonic()
                self._log.warning("traces are being dropped", lost_spans=self._num_lost, reason=self._complaint.text)
        return result

    def shutdown(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._inner.shutdown()


class _LastError(logging.Handler):
    """Replaces the library's own log lines about exporting."""

    def __init__(self) -> None:
        super().__init__()
        self.text: str | None = None
        logger = logging.getLogger("opentelemetry.exporter")
        logger.handlers, logger.propagate = [self], False
        # Silences warnings that its queue is full, which is the same problem.
        logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

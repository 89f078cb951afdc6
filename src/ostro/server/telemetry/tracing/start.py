"""Whether requests are traced, and where their spans go. Knows OpenTelemetry's environment variables; imports its
libraries only if they are.
"""

import os
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.errors import BadRequest, Unsupported
from ostro.server.telemetry.record import RequestRecord
from ostro.system.requirements import needs

_TRACES_PATH = "/v1/traces"
_PROTOCOL = "http/protobuf"
# The first that is set applies.
_PROTOCOL_NAMES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracer(Protocol):
    """The server's view of a tracer."""

    def record(self, record: RequestRecord) -> None:
        """Records a finished request; stores its trace id in the record."""

    def stop(self) -> None:
        """Sends the remaining spans, for a limited time."""


def start_tracing(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> Tracer | None:
    """None if requests are not traced. Raises BadRequest if our own setting asks for tracing but it is not possible.

    OpenTelemetry variables may be meant for other programs: unsupported values are only logged.
    """
    url = traces_url(endpoint, environ)
    if url is None:
        return None
    log = structlog.stdlib.get_logger("ostro.tracing")
    try:
        tracer = _tracer(url, environ)
    except BadRequest as error:
        if endpoint is not None:
            raise
        log.warning("requests are not traced", reason=error.message)
        return None
    # Without credentials that the URL may contain.
    log.info("requests are traced", collector=urlsplit(url).netloc.rpartition("@")[2])
    return tracer


def traces_url(endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """The URL that spans are posted to, from our own setting or OpenTelemetry's variables; None if neither is set."""
    if endpoint is not None:
        base = endpoint.rstrip("/")
        return base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
        return None
    if exact := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return exact
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/")
    return base + _TRACES_PATH if base else None


def _tracer(url: str, environ: Mapping[str, str]) -> Tracer:
    name = next((name for name in _PROTOCOL_NAMES if environ.get(name)), None)
    if name is not None and environ[name] != _PROTOCOL:
        raise BadRequest(
            f"{name} is {environ[name]}, but spans are sent over {_PROTOCOL} only. Unset it, and give the collector's "
            "HTTP port, usually 4318.",
            param="otlp_endpoint",
        )
    try:
        from ostro.server.telemetry.tracing.tracer import OtlpTracer
    except ModuleNotFoundError as error:
        raise Unsupported(needs("Tracing", "otel"), param="otlp_endpoint") from error
    try:
        return OtlpTracer(url)
    except ValueError as error:
        raise BadRequest(f"An OpenTelemetry variable is not supported: {error}", param="otlp_endpoint") from error


class TraceParent:
    """ASGI middleware, inside the request log: stores the request's parent trace in its record."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers, record = Headers(scope=scope), scope["state"]["record"]
            assert isinstance(record, RequestRecord)
            parents = headers.getlist("traceparent")
            if len(parents) == 1:
                record.traceparent = parents[0]
                record.tracestate = ",".join(headers.getlist("tracestate")) or None
        await self.app(scope, receive, send)

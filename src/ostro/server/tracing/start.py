"""Whether requests are traced, and where their spans go. Knows OpenTelemetry's variables; imports nothing of its
libraries unless they are.
"""

import os
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.errors import BadRequest
from ostro.extras import needs
from ostro.server.record import RequestRecord

_TRACES_PATH = "/v1/traces"
_PROTOCOL = "http/protobuf"
# The first that is set holds.
_PROTOCOL_NAMES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracer(Protocol):
    """What the server needs of one."""

    def record(self, record: RequestRecord) -> None:
        """Takes in a request that is over; its record learns of which trace it is part."""

    def stop(self) -> None:
        """Sends what is left, for a while."""


def start_tracing(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> Tracer | None:
    """None if requests are not traced. Raises BadRequest if they are, by our own setting, and cannot be.

    OpenTelemetry variables may be meant for other programs: one that we do not support is only logged.
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
    # Less a name and password that the address may hold.
    log.info("requests are traced", collector=urlsplit(url).netloc.rpartition("@")[2])
    return tracer


def traces_url(endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """What spans are posted to, by our own setting, else by OpenTelemetry's variables; None if by neither."""
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
            f"{name} is {environ[name]}, but spans go over {_PROTOCOL} alone. Unset it, and name the collector's port "
            "for HTTP, 4318 as a rule.",
            param="otlp_endpoint",
        )
    try:
        from ostro.server.tracing.tracer import OtlpTracer
    except ModuleNotFoundError as error:
        raise BadRequest(needs("Tracing", "otel"), param="otlp_endpoint") from error
    try:
        return OtlpTracer(url)
    except ValueError as error:
        raise BadRequest(f"An OpenTelemetry variable is not supported: {error}", param="otlp_endpoint") from error


class TraceParent:
    """ASGI middleware, within the request log: notes in the record whose trace the request belongs to."""

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

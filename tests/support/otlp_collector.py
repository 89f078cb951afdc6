"""A collector of OpenTelemetry traces in a process of its own, for tests: takes OTLP over HTTP, as protobuf, and adds
each span to a file as a line of JSON.

`python otlp_collector.py FILE` is that process; it prints its port.
"""

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

_PATIENCE = 30.0


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start: int
    end: int
    attributes: dict[str, object]
    status: str
    message: str
    resource: dict[str, object]
    tracestate: str


@dataclass(frozen=True)
class Collector:
    url: str
    file: Path

    @property
    def text(self) -> str:
        """All that has arrived."""
        return self.file.read_text()

    def spans(self) -> list[Span]:
        # The last line may be under way.
        lines = self.text.split("\n")[:-1]
        return [Span(**json.loads(line)) for line in lines]

    def until(self, is_there: Callable[[list[Span]], bool]) -> list[Span]:
        """Waits until the condition holds, and returns the spans."""
        deadline = time.monotonic() + _PATIENCE
        while not is_there(spans := self.spans()):
            assert time.monotonic() < deadline, f"it did not come; there are {[span.name for span in spans]}"
            time.sleep(0.02)
        return spans

    def request(self, request_id: str, num_spans: int) -> list[Span]:
        """A request's span, then its parts in order of time, once there are `num_spans` in all."""

        def tree(spans: list[Span]) -> list[Span]:
            roots = [span for span in spans if span.attributes.get("ostro.request.id") == request_id]
            parts = [span for span in spans if roots and span.parent_id == roots[0].span_id]
            return [*roots, *sorted(parts, key=lambda span: (span.start, span.end))]

        return tree(self.until(lambda spans: len(tree(spans)) >= num_spans))


@contextmanager
def collector(directory: Path) -> Iterator[Collector]:
    file = directory / "spans.jsonl"
    file.touch()
    process = subprocess.Popen([sys.executable, __file__, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as out:
        try:
            yield Collector(f"http://127.0.0.1:{int(out.readline())}", file)
        finally:
            process.kill()
            process.wait()


# --- the process ----------------------------------------------------------------------------------------------------


def _serve(file: Path) -> None:
    writing = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_right:
                request = ExportTraceServiceRequest()
                request.ParseFromString(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
                with writing, file.open("a") as sink:
                    sink.writelines(json.dumps(span) + "\n" for span in _told(request))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if is_right else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


def _told(request: ExportTraceServiceRequest) -> Iterator[dict[str, object]]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "name": span.name,
                    "trace_id": span.trace_id.hex(),
                    "span_id": span.span_id.hex(),
                    "parent_id": span.parent_span_id.hex(),
                    "kind": trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    "start": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "attributes": _plain(span.attributes),
                    "status": trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
                    "message": span.status.message,
                    "resource": _plain(resource.resource.attributes),
                    "tracestate": span.trace_state,
                }


def _plain(pairs: "Iterator[KeyValue]") -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

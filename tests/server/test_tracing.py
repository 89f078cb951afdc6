import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from checkout import ROOT
from live_server import LiveServer, live_server
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    url_attributes,
)
from otlp_collector import Collector, Span, collector
from sse_events import events_of

from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.server.settings import Given, read_settings
from ostro.server.telemetry.record import RequestRecord
from ostro.server.telemetry.tracing.spans import attributes_of, is_failure, name_of, phases_of
from ostro.server.telemetry.tracing.start import start_tracing, traces_url

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Collectors of tests are on this machine, whatever proxy there is.
HERE = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
SOON = {**HERE, "OTEL_BSP_SCHEDULE_DELAY": "50"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PATIENCE = 30.0


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("collector")) as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[LiveServer]:
    """Two sequences at a time, and steps that take a while."""
    args = ("--otlp-endpoint", traces.url, "--max-batch-seqs", "2")
    env = {**SOON, "OTEL_SERVICE_NAME": "shop", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    with live_server(tmp_path_factory.mktemp("traced"), *args, faults="fake,step_seconds=0.02", env=env) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def parts_of(spans: list[Span]) -> list[str]:
    return [span.name for span in spans[1:]]


def line_of(server: LiveServer, request_id: str) -> dict[str, object]:
    """The request's line in the log, once it is there."""
    until(lambda: request_id in server.log_text.rpartition("\n")[0])
    [line] = [line for line in server.log_text.splitlines() if request_id in line]
    told: dict[str, object] = json.loads(line)
    return told


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what arrives ---------------------------------------------------------------------------------------------------


def test_request_is_a_tree_of_spans_with_its_tokens(client: httpx.Client, traces: Collector) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
    }
    response = client.post(CHAT, json=body)
    answer, usage = response.json(), response.json()["usage"]
    root, queue, prefill, decode = spans = traces.request(response.headers["x-request-id"], 4)
    assert parts_of(spans) == ["queue", "prefill", "decode"]
    assert (root.name, root.kind, root.status, root.parent_id) == (f"POST {CHAT}", "SERVER", "UNSET", "")
    assert {part.kind for part in spans[1:]} == {"INTERNAL"}
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "url.path": CHAT,
        "url.scheme": "http",
        "ostro.request.id": response.headers["x-request-id"],
        "ostro.prompts": 1,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ostro",
        "gen_ai.request.model": "default",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": answer["model"],
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    assert (
        root.start <= queue.start <= queue.end == prefill.start < prefill.end == decode.start < decode.end <= root.end
    )
    assert prefill.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert decode.attributes == {"gen_ai.usage.output_tokens": 6, "ostro.preemptions": 0}
    assert (root.resource["service.name"], root.resource["deployment.environment.name"]) == ("shop", "test")
    assert root.resource["service.version"]
    # By the wall clock, within the time that this machine has been up to now.
    assert abs(root.end / 1e9 - time.time()) < 600


def test_stream_span_records_its_first_token_and_a_prefix_hit_shows_on_prefill(
    client: httpx.Client, traces: Collector
) -> None:
    body = {"prompt": [5] * 100, "max_tokens": 4, "ignore_eos": True, "stream": True}
    client.post(COMPLETIONS, json=body)
    response = client.post(COMPLETIONS, json=body)
    root, _, prefill, decode = traces.request(response.headers["x-request-id"], 4)
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.response.id"] == events_of(response.text)[0]["id"]
    first = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert first == pytest.approx((prefill.end - root.start) / 1e9, abs=1e-3)
    cached = prefill.attributes["gen_ai.usage.cache_read.input_tokens"]
    assert isinstance(cached, int)
    assert 80 <= cached < 100
    assert decode.attributes["gen_ai.usage.output_tokens"] == 4


def test_several_prompts_and_choices_are_one_tree_that_counts_them_all(client: httpx.Client, traces: Collector) -> None:
    body = {"prompt": ["a", "b c"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    response = client.post(COMPLETIONS, json=body)
    root, queue, prefill, decode = traces.request(response.headers["x-request-id"], 4)
    assert (root.attributes["ostro.prompts"], root.attributes["gen_ai.request.choice.count"]) == (2, 2)
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert decode.attributes["gen_ai.usage.output_tokens"] == root.attributes["gen_ai.usage.output_tokens"] == 12
    assert queue.end == prefill.start < prefill.end == decode.start < decode.end


def test_scoring_has_no_decode(client: httpx.Client, traces: Collector) -> None:
    response = client.post("/loglikelihood", json={"prompts": ["the"], "continuations": [" dog"]})
    assert response.status_code == 200
    spans = traces.request(response.headers["x-request-id"], 3)
    assert parts_of(spans) == ["queue", "prefill"]
    assert spans[0].attributes["gen_ai.operation.name"] == "loglikelihood"
    assert "gen_ai.request.temperature" not in spans[0].attributes


def test_waiting_in_the_engine_is_queue(client: httpx.Client, server: LiveServer, traces: Collector) -> None:
    """The gate lets in more than the engine runs at a time: who waits behind it waits as well."""
    busy = {"prompt": "a", "n": 2, "max_tokens": 25, "ignore_eos": True, "stream": True}
    with client.stream("POST", COMPLETIONS, json=busy) as first, server.client() as other:
        chunks = first.iter_bytes()
        next(chunks)
        second = other.post(COMPLETIONS, json={"prompt": "b", "max_tokens": 2, "ignore_eos": True})
        for _ in chunks:
            pass
    ahead = traces.request(first.headers["x-request-id"], 4)
    behind = traces.request(second.headers["x-request-id"], 4)
    queue = behind[1]
    assert queue.attributes["ostro.gate.seconds"] == 0
    # Its first step came when all of the other's were over but for the last.
    assert queue.end > ahead[3].start + 0.8 * (ahead[3].end - ahead[3].start)
    told = line_of(server, second.headers["x-request-id"])
    assert told["queue_seconds"] == pytest.approx((queue.end - queue.start) / 1e9, abs=1e-3)


# --- whose trace it is ----------------------------------------------------------------------------------------------


def ask(client: httpx.Client, **headers: str) -> str:
    response = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}, headers=headers)
    assert response.status_code == 200
    return str(response.headers["x-request-id"])


def test_request_joins_the_trace_of_its_caller_and_its_log_line_names_it(
    client: httpx.Client, server: LiveServer, traces: Collector
) -> None:
    asked = ask(client, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
    root, *_ = traces.request(asked, 4)
    assert (root.trace_id, root.parent_id, root.tracestate) == (TRACE, PARENT, "vendor=1")
    line = line_of(server, asked)
    assert (line["trace_id"], line["span_id"]) == (TRACE, root.span_id)


def test_caller_that_does_not_sample_gets_no_spans_but_the_log_knows_its_trace(
    client: httpx.Client, server: LiveServer, traces: Collector
) -> None:
    other = "1af7651916cd43dd8448eb211c80319c"
    unsampled = ask(client, traceparent=f"00-{other}-{PARENT}-00")
    traces.request(ask(client), 4)
    assert other not in traces.text
    assert line_of(server, unsampled)["trace_id"] == other


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_invalid_parent_begins_a_trace(client: httpx.Client, traces: Collector, parent: str) -> None:
    root, *_ = traces.request(ask(client, traceparent=parent), 4)
    assert root.parent_id == ""
    assert root.trace_id not in (TRACE, "0" * 32)


def test_probes_are_not_traced_and_other_paths_are(client: httpx.Client, traces: Collector) -> None:
    probes = [client.get(path).headers["x-request-id"] for path in ("/healthz", "/readyz", "/metrics")]
    [root] = traces.request(client.get("/v1/models").headers["x-request-id"], 1)
    assert root.name == "GET /v1/models"
    assert not any(name.startswith("gen_ai") for name in root.attributes)
    assert not any(probe in traces.text for probe in probes)


def test_no_text_of_prompt_or_answer_leaves(client: httpx.Client, traces: Collector) -> None:
    body = {
        "prompt": "xylophone secret",
        "max_tokens": 8,
        "ignore_eos": True,
        "stop": ["zeppelin"],
        "bad_words": ["quagmire"],
        "user": "somebody",
    }
    response = client.post(COMPLETIONS, json=body, headers={"authorization": "Bearer hush-hush"})
    assert response.status_code == 200
    traces.request(response.headers["x-request-id"], 4)
    answer = response.json()["choices"][0]["text"]
    for text in ("xylophone", "secret", "zeppelin", "quagmire", "somebody", "hush", json.dumps(answer)[1:-1]):
        assert text not in traces.text


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (COMPLETIONS, {"prompt": "a", "n": -1}, 400, "invalid_request_error"),
        (COMPLETIONS, {"prompt": "a", "model": "nobody"}, 404, "model_not_found"),
        ("/v1/nothing", {}, 404, "not_found"),
    ],
)
def test_refusal_is_no_error_of_the_servers(
    client: httpx.Client, traces: Collector, path: str, body: Mapping[str, object], status: int, kind: str
) -> None:
    response = client.post(path, json=body)
    [root] = traces.request(response.headers["x-request-id"], 1)
    assert (response.status_code, root.attributes["http.response.status_code"]) == (status, status)
    assert root.status == "UNSET"
    assert root.attributes["error.type"] == kind


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_ends_its_spans(
    client: httpx.Client, server: LiveServer, traces: Collector, stream: bool
) -> None:
    name = f"gone-{stream}"
    body = b'{"prompt":"x","max_tokens":8000,"ignore_eos":true,"stream":%s}' % str(stream).lower().encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: %s\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n"
    )
    address = urlsplit(server.url)
    until(lambda: not is_running(client))
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head % (name.encode(), len(body)) + body)
        until(lambda: is_running(client))
    root, *parts = traces.request(name, 3)
    assert (root.status, root.attributes["error.type"]) == ("ERROR", "client_gone")
    assert [part.name for part in parts][:2] == ["queue", "prefill"]
    assert all(root.start <= part.start <= part.end <= root.end for part in parts)


def is_running(client: httpx.Client) -> bool:
    """By the engine's own count."""
    lines = client.get("/metrics").text.splitlines()
    return any(line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0") for line in lines)


def test_engine_that_dies_is_an_error_and_the_last_spans_are_sent_at_the_end(tmp_path: Path, traces: Collector) -> None:
    """By OpenTelemetry's own variables, and with a batch that would wait for an hour."""
    env = {**HERE, "OTEL_EXPORTER_OTLP_ENDPOINT": traces.url, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    with live_server(tmp_path, faults="fake,crash_after=10,step_seconds=0.01", env=env) as server:
        with server.client() as client:
            body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
            response = client.post(COMPLETIONS, json=body)
            assert '"unavailable"' in response.text
        asked = response.headers["x-request-id"]
        assert asked not in traces.text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    root, *parts = traces.request(asked, 4)
    assert (root.status, root.message, root.attributes["error.type"]) == ("ERROR", "unavailable", "unavailable")
    assert root.attributes["http.response.status_code"] == 200
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert root.resource["service.name"] == "ostro"


def test_collector_that_is_down_costs_nothing_but_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    env = {**SOON, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with live_server(tmp_path, "--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces", env=env) as server:
        with server.client() as client:
            ask(client)
            deadline = time.monotonic() + PATIENCE
            while '"traces are being dropped"' not in server.log_text:
                assert time.monotonic() < deadline, server.log_text
                ask(client)
            for _ in range(20):
                ask(client)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    told = [json.loads(line) for line in server.log_text.splitlines()]
    assert [line["level"] for line in told if line["logger"].startswith(("opentelemetry", "urllib3"))] == []
    [complaint] = [line for line in told if line["message"] == "traces are being dropped"]
    assert complaint["level"] == "warning"
    # Those of the first batch, which may have been sent after any request.
    assert complaint["lost_spans"] > 0


@pytest.mark.full
def test_end_does_not_wait_for_a_collector_that_hangs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {**SOON, "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
        with live_server(tmp_path, "--otlp-endpoint", url, env=env) as server:
            with server.client() as client:
                for _ in range(3):
                    ask(client)
            connection, _ = silent.accept()
            with connection:
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(PATIENCE) == 0


# --- whether requests are traced ------------------------------------------------------------------------------------


@pytest.mark.full
def test_nothing_of_opentelemetry_is_imported_unless_requests_are_traced() -> None:
    """But for its interface, which FastAPI imports."""
    code = (
        "import sys, ostro.server.lifecycle\n"
        "from ostro.server.telemetry.tracing.start import start_tracing\n"
        "assert start_tracing(None, {}) is None\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto', 'google.protobuf')\n"
        "print(*(name for name in sys.modules if name.startswith(parts)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.fixture
def without_opentelemetry(tmp_path: Path) -> dict[str, str]:
    """An environment in which it cannot be imported, as where it is not installed; its interface alone is, as
    FastAPI's requirement.
    """
    hiding = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hiding)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.full
def test_setting_without_the_packages_is_refused_with_what_to_install(
    tmp_path: Path, without_opentelemetry: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "ostro", "serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:4318"]
    ran = subprocess.run(
        command, env=without_opentelemetry, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 1
    assert f"Run: pip install -e '{ROOT}[otel]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_variables_of_others_are_no_reason_not_to_start(without_opentelemetry: dict[str, str]) -> None:
    code = (
        "from ostro.server.telemetry.tracing.start import start_tracing\n"
        "print(start_tracing(None, {'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:4318'}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=without_opentelemetry, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "None"
    assert "[otel]'" in ran.stdout + ran.stderr


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_other_protocols_are_refused_by_name(protocol: str) -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    with pytest.raises(BadRequest, match=f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}"):
        start_tracing("http://127.0.0.1:4318", environ)
    assert start_tracing(None, {**environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}) is None


def test_variable_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(BadRequest, match="An OpenTelemetry variable is not supported: max_queue_size"):
        start_tracing("http://127.0.0.1:4318")


@pytest.mark.parametrize("value", ["localhost:4317", "grpc://localhost:4317", "http://", "4318"])
def test_invalid_address_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(BadRequest, match=r"http://HOST:PORT"):
        read_settings({"otlp_endpoint": Given(value, "--otlp-endpoint")}, directory=tmp_path)


@pytest.mark.parametrize(
    ("endpoint", "environ", "url"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp", {}, "https://c/otlp/v1/traces"),
        ("http://c", {"ENDPOINT": "http://d", "TRACES_ENDPOINT": "http://e"}, "http://c/v1/traces"),
        (None, {"ENDPOINT": "http://d:4318/"}, "http://d:4318/v1/traces"),
        (None, {"ENDPOINT": "http://d", "TRACES_ENDPOINT": "http://e/in"}, "http://e/in"),
        (None, {"ENDPOINT": ""}, None),
        (None, {"ENDPOINT": "http://d", "OTEL_SDK_DISABLED": "true"}, None),
        (None, {"ENDPOINT": "http://d", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_spans_go_where_the_setting_or_the_variables_say(
    endpoint: str | None, environ: Mapping[str, str], url: str | None
) -> None:
    given = {name if name.startswith("OTEL") else f"OTEL_EXPORTER_OTLP_{name}": each for name, each in environ.items()}
    assert traces_url(endpoint, given) == url


# --- what a record tells --------------------------------------------------------------------------------------------


def a_record() -> RequestRecord:
    record = RequestRecord(id="r", method="POST", path=CHAT, route=CHAT, status=200, stream=True, started=100.0)
    record.params = SamplingParams(n=2, top_k=5, presence_penalty=0.5, frequency_penalty=0.25, seed=1)
    record.model, record.asked_model, record.response_id = "tiny", "default", "chatcmpl-1"
    record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.num_prompts = 7, 4, 3, 1
    record.queued_at, record.admitted_at, record.began = 101.0, 102.0, 103.0
    record.first_token, record.last_token, record.ended = 104.0, 105.0, 106.0
    record.finish_reasons, record.error = ["stop"], "timeout"
    return record


def test_names_are_those_of_the_conventions() -> None:
    modules = (error_attributes, gen_ai_attributes, http_attributes, url_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    record = a_record()
    told = {*attributes_of(record)} | {name for phase in phases_of(record) for name in phase.attributes}
    told |= {*attributes_of(RequestRecord(id="r", method="BREW", path="/pot", status=405))}
    assert len(told) > 20
    assert {name for name in told if name not in known and not name.startswith("ostro.")} == set()


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ({}, [("queue", 101, 103), ("prefill", 103, 104), ("decode", 104, 105)]),
        ({"queued_at": None}, []),
        ({"admitted_at": None, "began": None}, [("queue", 101, 106)]),
        ({"began": None, "first_token": None, "last_token": None}, [("queue", 101, 106)]),
        ({"first_token": None, "last_token": None}, [("queue", 101, 103), ("prefill", 103, 106)]),
        ({"last_token": None}, [("queue", 101, 103), ("prefill", 103, 104), ("decode", 104, 106)]),
        # On a system whose processes do not share a clock.
        ({"began": 7.0}, [("queue", 101, 102), ("prefill", 102, 104), ("decode", 104, 105)]),
        ({"began": 900.0}, [("queue", 101, 104), ("prefill", 104, 104), ("decode", 104, 105)]),
    ],
)
def test_phases_follow_one_another_and_end_with_the_request(
    changes: Mapping[str, float | None], phases: list[tuple[str, float, float]]
) -> None:
    record = a_record()
    for name, value in changes.items():
        setattr(record, name, value)
    assert [(phase.name, phase.start, phase.end) for phase in phases_of(record)] == phases


@pytest.mark.parametrize(
    ("status", "error", "fails"),
    [
        (200, None, False),
        (400, "invalid_value", False),
        (429, "queue_full", False),
        (200, "unavailable", True),
        (503, "unavailable", True),
        (500, None, True),
        (499, "client_gone", True),
        (None, "client_gone", True),
    ],
)
def test_only_what_the_server_owes_is_a_failure(status: int | None, error: str | None, fails: bool) -> None:
    assert is_failure(RequestRecord(id="r", method="POST", path=CHAT, status=status, error=error)) is fails


def test_made_up_methods_and_paths_are_not_used_as_names() -> None:
    assert name_of(RequestRecord(id="r", method="BREW", path="/pot", status=404)) == "HTTP"
    assert name_of(RequestRecord(id="r", method="GET", path="/v1/made/up", status=404)) == "GET"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is only known not to make a phase negative")
def test_processes_of_one_machine_share_the_clock() -> None:
    before = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", "import time; print(time.monotonic())"], capture_output=True, text=True, check=True
    )
    assert before < float(ran.stdout) < time.monotonic()


# --- through a collector that others run ----------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("rotel") is None, reason="pip install --pre rotel: a collector, in Rust")
def test_collector_of_others_takes_the_spans_and_passes_them_on(tmp_path: Path) -> None:
    found = importlib.util.find_spec("rotel")
    assert found is not None
    assert found.submodule_search_locations is not None
    binary = Path(found.submodule_search_locations[0]) / "rotel-agent"
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        http, grpc = one.getsockname()[1], two.getsockname()[1]
    with collector(tmp_path) as sink:
        command = [str(binary), "start", "--otlp-http-endpoint", f"127.0.0.1:{http}"]
        command += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--exporter", "otlp"]
        command += ["--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", sink.url]
        agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{http}"
            with live_server(tmp_path, "--otlp-endpoint", url, env=SOON) as server, server.client() as client:
                spans = sink.request(ask(client), 4)
                assert parts_of(spans) == ["queue", "prefill", "decode"]
                assert spans[0].attributes["gen_ai.usage.output_tokens"] == 2
        finally:
            agent.terminate()
            agent.wait()

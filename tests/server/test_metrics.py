import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from ostro.engine.counters import Counters, EngineCounters, ModelCounters
from ostro.engine_process.messages import Heartbeat, ModelInfo
from ostro.server.admission.auth import Keyring
from ostro.server.admission.ledger import Ledger
from ostro.server.app import build_app
from ostro.server.lifecycle import middlewares
from ostro.server.models.build import build_models
from ostro.server.settings import Given, read_settings
from ostro.server.telemetry.metrics import Metrics
from ostro.server.telemetry.record import RequestRecord


@dataclass
class Service:
    """The part of a service that metrics read, as plain values."""

    info: ModelInfo | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


@dataclass
class Models:
    models: dict[str, Service]
    counters: ModelCounters = field(default_factory=ModelCounters)
    first_name: str = "tiny"
    num_loads: int = 1
    num_evictions: int = 0
    num_load_failures: int = 0

    def loaded(self) -> list[tuple[str, Service]]:
        return list(self.models.items())

    def totals(self) -> list[tuple[str, Counters]]:
        return [(name, self.counters.totals(name)) for name in ("tiny", "other")]


@pytest.fixture
def metrics() -> Metrics:
    return metrics_of(Service())


@pytest.fixture
def app(metrics: Metrics, tmp_path: Path) -> FastAPI:
    """Over a model that is never loaded, with the middlewares that count requests."""
    settings = read_settings({"model": Given("org/tiny", "--model")}, directory=tmp_path).settings

    async def build() -> FastAPI:
        return build_app(build_models(settings), middlewares=middlewares(settings, Keyring(), metrics))

    return asyncio.run(build())


def ask(app: FastAPI, method: str, path: str) -> None:
    async def request() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            await client.request(method, path)

    asyncio.run(request())


def metrics_of(service: Service, line: "Line | None" = None) -> Metrics:
    return Metrics(Models({"tiny": service}), line or Line(), Ledger(0))


@dataclass
class Line:
    num_waiting: int = 0
    num_inside: int = 0


def read(metrics: Metrics) -> dict[str, float]:
    """Sample -> value, the model's label left out."""
    samples = {}
    for line in metrics.render().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = (
                name.replace('model_name="tiny"', "")
                .replace("{}", "")
                .replace(",}", "}")
                .replace("{,", "{")
                .replace(",,", ",")
            )
            samples[name] = float(value)
    return samples


def a_record() -> RequestRecord:
    record = RequestRecord(id="r", method="POST", path="/v1/completions", stream=True, status=200, started=100.0)
    record.route = record.path
    record.prompt_tokens, record.queued_at, record.admitted_at, record.began = 7, 100.5, 101.5, 101.5
    record.first_token, record.last_token, record.ended = 102.0, 103.0, 103.5
    record.completion_tokens, record.finish_reasons = 11, ["stop", "length"]
    return record


def test_finished_request_is_counted_under_the_names_that_others_chart() -> None:
    metrics = metrics_of(Service(), Line())
    metrics.record(a_record())
    samples = read(metrics)
    assert samples["vllm:prompt_tokens_total"] == 7
    assert samples["vllm:generation_tokens_total"] == 11
    assert samples['vllm:request_success_total{finished_reason="stop"}'] == 1
    assert samples['vllm:request_success_total{finished_reason="length"}'] == 1
    assert samples["vllm:e2e_request_latency_seconds_sum"] == 3.5
    assert samples["vllm:time_to_first_token_seconds_sum"] == 2.0
    assert samples["vllm:request_queue_time_seconds_sum"] == 1.0
    assert samples["vllm:inter_token_latency_seconds_sum"] == 0.1
    assert samples['ostro_http_requests_total{path="/v1/completions",status="200"}'] == 1


def test_queue_lasts_until_the_engine_runs_it() -> None:
    """It ended at the gate, and who waited in the engine seemed not to wait."""
    metrics, record = metrics_of(Service()), a_record()
    record.began = 101.75
    metrics.record(record)
    assert read(metrics)["vllm:request_queue_time_seconds_sum"] == 1.25


def test_queue_of_a_request_that_never_ran_lasts_until_it_left() -> None:
    """Those that timed out in the engine's line counted as if they had not waited at all."""
    metrics, record = metrics_of(Service()), a_record()
    record.began = record.first_token = record.last_token = None
    metrics.record(record)
    assert read(metrics)["vllm:request_queue_time_seconds_sum"] == 3.0


def test_engines_state_is_read_from_its_heartbeat() -> None:
    service = Service(heartbeat=Heartbeat(running=3, waiting=2, pages_total=100, pages_free=50, pages_cached=25))
    samples = read(metrics_of(service, Line(num_waiting=4, num_inside=9)))
    assert samples["vllm:num_requests_running"] == 3
    assert samples["vllm:num_requests_waiting"] == 6
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert (samples["ostro_pages_total"], samples["ostro_pages_free"], samples["ostro_pages_cached"]) == (100, 50, 25)
    assert samples["ostro_requests_under_way"] == 9
    assert "ostro_load_seconds" not in samples


def test_loaded_model_reports_its_times() -> None:
    info = ModelInfo(
        name="tiny",
        max_len=8,
        vocab_size=9,
        page_size=4,
        num_pages=2,
        load_seconds=1.5,
        warm_up_seconds=0.5,
        resident_bytes=1024,
        generates=True,
    )
    samples = read(metrics_of(Service(info=info), Line()))
    assert (samples["ostro_load_seconds"], samples["ostro_warm_up_seconds"]) == (1.5, 0.5)
    assert samples["ostro_engine_resident_bytes"] == 1024


def test_counters_do_not_fall_when_an_engine_restarts_or_ends() -> None:
    models, engine = Models({}), EngineCounters()
    metrics = Metrics(models, Line(), Ledger(0))

    def counted() -> tuple[float, float, float]:
        samples = read(metrics)
        names = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "ostro_engine_restarts_total")
        return samples[names[0]], samples[names[1]], samples[names[2]]

    models.counters.note("tiny", engine)
    engine.take(Counters(steps=10, preemptions=4, cache_hits=16))
    assert counted() == (4, 16, 0)
    engine.end_process()
    engine.restarts += 1
    assert counted() == (4, 16, 1)
    engine.take(Counters(steps=20, preemptions=3))
    assert counted() == (7, 16, 1)
    # Nobody looks between the last of one engine and the first of the next.
    engine.take(Counters(steps=25, preemptions=5, cache_hits=16))
    engine.end_process()
    another = EngineCounters()
    models.counters.note("tiny", another)
    assert counted() == (9, 32, 1)
    another.take(Counters(steps=30, preemptions=1))
    assert counted() == (10, 32, 1)


def test_request_that_never_reached_the_engine_counts_only_as_an_answer() -> None:
    metrics = metrics_of(Service(), Line())
    path = "/v1/completions"
    metrics.record(RequestRecord(id="r", method="POST", path=path, route=path, status=400))
    samples = read(metrics)
    assert samples['ostro_http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert "vllm:e2e_request_latency_seconds_count" not in samples


def test_made_up_paths_make_no_labels(app: FastAPI, metrics: Metrics) -> None:
    """Anyone could make up labels: paths that looked like those of a model were taken as they were."""
    made_up = [("GET", f"/made/up/{number}") for number in range(5)]
    made_up += [("POST", "/v1/made-up/chat"), ("GET", "/v1/made-up/completions"), ("OPTIONS", "/made-up")]
    made_up += [("POST", "/v1/chat/made-up/completions"), ("POST", "/v1/x/made-up/chat/completions")]
    made_up += [("GET", "/v1/models/made-up"), ("POST", "/admin/unload/made/up"), ("POST", "/tokenize/made-up")]
    for method, path in made_up:
        ask(app, method, path)
    labels = {name for name in read(metrics) if name.startswith("ostro_http_requests_total")}
    assert not any("made" in label for label in labels)
    assert {'path="not_found",status="404"', 'path="method_not_allowed",status="405"'} <= {
        label.removeprefix("ostro_http_requests_total{").removesuffix("}") for label in labels
    }


@pytest.mark.parametrize(
    ("method", "path", "label", "status"),
    [
        ("POST", "/v1/made/up/chat/completions", "/v1/{model}/chat/completions", 415),
        ("POST", "/v1/made-up/completions", "/v1/{model}/completions", 415),
        ("GET", "/v1/models/made/up", "/v1/models/{id}", 404),
        ("POST", "/admin/unload/made/up", "/admin/unload/{model}", 404),
        ("POST", "/v1/chat/completions", "/v1/chat/completions", 415),
        ("POST", "/v1/completions", "/v1/completions", 415),
        ("GET", "/healthz", "/healthz", 200),
        ("GET", "/metrics", "/metrics", 200),
        ("DELETE", "/v1/completions", "method_not_allowed", 405),
        ("GET", "/v1/made/up", "not_found", 404),
    ],
)
def test_requests_are_counted_under_the_template_of_their_path(
    app: FastAPI, metrics: Metrics, method: str, path: str, label: str, status: int
) -> None:
    ask(app, method, path)
    assert f'ostro_http_requests_total{{path="{label}",status="{status}"}}' in read(metrics)


def test_request_that_was_turned_away_before_routing_has_one_label(metrics: Metrics) -> None:
    for number in range(5):
        metrics.record(RequestRecord(id="r", method="GET", path=f"/made/up/{number}", status=401))
    assert read(metrics)['ostro_http_requests_total{path="other",status="401"}'] == 5


def test_models_are_told_apart_and_counters_survive_an_eviction() -> None:
    models, engine = Models({"tiny": Service(), "other": Service()}), EngineCounters()
    metrics = Metrics(models, Line(), Ledger(0))
    models.counters.note("other", engine)
    engine.take(Counters(preemptions=4))
    running = 'vllm:num_requests_running{model_name="other"}'
    preempted = 'vllm:num_preemptions_total{model_name="other"}'
    assert running in read(metrics)
    del models.models["other"]
    samples = read(metrics)
    assert running not in samples
    assert samples[preempted] == 4


def test_sizes_and_adapters_are_labels_that_endpoint_pickers_read() -> None:
    info = ModelInfo(
        name="tiny",
        max_len=64,
        vocab_size=9,
        generates=True,
        page_size=16,
        num_pages=500,
        load_seconds=1.0,
        warm_up_seconds=1.0,
        resident_bytes=1,
        adapters=("french", "sql"),
    )
    samples = read(metrics_of(Service(info=info)))
    assert samples['vllm:cache_config_info{block_size="16",num_gpu_blocks="500"}'] == 1
    [time_of_report] = [
        value
        for name, value in samples.items()
        if name == 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="french,sql",waiting_lora_adapters=""}'
    ]
    assert time_of_report > 1.7e9


def test_without_a_cache_or_adapters_there_is_nothing_to_pick_by() -> None:
    info = ModelInfo("tiny", 64, 9, True, 16, 500, 1.0, 1.0, 1, keeps_kv=False)
    samples = read(metrics_of(Service(info=info)))
    assert not [name for name in samples if "cache_config" in name or "lora" in name]

from dataclasses import dataclass, field

import pytest

from ostro.engine.messages import ModelInfo, Pulse
from ostro.server.logging import RequestRecord
from ostro.server.metrics import Metrics


@dataclass
class Service:
    """What metrics read of a service, as plain values."""

    info: ModelInfo | None = None
    pulse: Pulse = field(default_factory=Pulse)
    restarts: int = 0


@dataclass
class Fleet:
    models: dict[str, Service]
    first_name: str = "tiny"
    num_loads: int = 1
    num_evictions: int = 0

    def loaded(self) -> list[tuple[str, Service]]:
        return list(self.models.items())


def metrics_of(service: Service, line: "Line | None" = None) -> Metrics:
    return Metrics(Fleet({"tiny": service}), line or Line())


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
            name = name.replace('model_name="tiny"', "").replace("{}", "").replace(",}", "}").replace("{,", "{")
            samples[name] = float(value)
    return samples


def a_record() -> RequestRecord:
    record = RequestRecord(id="r", method="POST", path="/v1/completions", stream=True, status=200, started=100.0)
    record.prompt_tokens, record.lined_up, record.let_in = 7, 100.5, 101.5
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


def test_engines_state_is_read_from_its_pulse() -> None:
    service = Service(
        pulse=Pulse(steps=9, running=3, waiting=2, pages_total=100, pages_free=50, pages_cached=25, cache_hits=16)
    )
    samples = read(metrics_of(service, Line(num_waiting=4, num_inside=9)))
    assert samples["vllm:num_requests_running"] == 3
    assert samples["vllm:num_requests_waiting"] == 6
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert samples["vllm:prefix_cache_hits_total"] == 16
    assert (samples["ostro_pages_total"], samples["ostro_pages_free"], samples["ostro_pages_cached"]) == (100, 50, 25)
    assert samples["ostro_requests_under_way"] == 9
    assert "ostro_load_seconds" not in samples


def test_loaded_model_tells_its_times() -> None:
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


def test_counters_do_not_fall_when_the_engine_starts_anew() -> None:
    service = Service(pulse=Pulse(steps=10, preemptions=4))
    metrics = metrics_of(service, Line())
    assert read(metrics)["vllm:num_preemptions_total"] == 4
    service.restarts, service.pulse = 1, Pulse()
    assert read(metrics)["vllm:num_preemptions_total"] == 4
    service.pulse = Pulse(steps=20, preemptions=3)
    samples = read(metrics)
    assert (samples["vllm:num_preemptions_total"], samples["ostro_engine_restarts_total"]) == (7, 1)


def test_request_that_never_reached_the_engine_counts_only_as_an_answer() -> None:
    metrics = metrics_of(Service(), Line())
    metrics.record(RequestRecord(id="r", method="POST", path="/v1/completions", status=400))
    samples = read(metrics)
    assert samples['ostro_http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert "vllm:e2e_request_latency_seconds_count" not in samples


def test_made_up_paths_make_no_labels() -> None:
    metrics = metrics_of(Service(), Line())
    for number in range(50):
        metrics.record(RequestRecord(id="r", method="GET", path=f"/made/up/{number}", status=404))
        metrics.record(RequestRecord(id="r", method="OPTIONS", path=f"/made/up/{number}", status=200))
        metrics.record(RequestRecord(id="r", method="GET", path=f"/made/up/{number}", status=401))
    assert not any("made" in name for name in read(metrics))


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/made/up/chat/completions", "/v1/{model}/chat/completions"),
        ("/v1/made-up/completions", "/v1/{model}/completions"),
        ("/admin/unload/made/up", "/admin/unload/{model}"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/completions", "/v1/completions"),
        ("/admin/stats", "/admin/stats"),
    ],
)
def test_models_names_in_paths_make_no_labels(path: str, label: str) -> None:
    metrics = metrics_of(Service())
    metrics.record(RequestRecord(id="r", method="POST", path=path, status=400))
    assert f'ostro_http_requests_total{{path="{label}",status="400"}}' in read(metrics)


def test_models_are_told_apart_and_counters_survive_an_eviction() -> None:
    fleet = Fleet({"tiny": Service(), "other": Service(pulse=Pulse(steps=9, preemptions=4))})
    metrics = Metrics(fleet, Line())
    other = 'vllm:num_preemptions_total{model_name="other"}'
    assert read(metrics)[other] == 4
    evicted = fleet.models.pop("other")
    assert other not in read(metrics)
    evicted.pulse = Pulse(steps=12, preemptions=1)
    fleet.models["other"] = evicted
    assert read(metrics)[other] == 5

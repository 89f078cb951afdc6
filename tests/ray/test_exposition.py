"""Metrics of several replicas as one text."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ostro.ray.broadcast import merged


def exposed(count: int) -> str:
    registry = CollectorRegistry()
    Counter("vllm:tokens", "Tokens.", ["model_name"], registry=registry).labels("m").inc(count)
    Gauge("running", "Running.", registry=registry).set(count)
    Histogram("seconds", "Seconds.", buckets=(1, 2), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_every_sample_is_there_with_its_replica() -> None:
    text = merged({"one": exposed(3), "two": exposed(4)}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["vllm:tokens"].type == "counter"
    tokens = {s.labels["replica"]: s.value for s in families["vllm:tokens"].samples if s.name == "vllm:tokens_total"}
    assert tokens == {"one": 3, "two": 4}
    assert families["seconds"].type == "histogram"
    assert {s.labels["replica"] for s in families["seconds"].samples if s.name == "seconds_bucket"} == {"one", "two"}
    assert text.count("# TYPE running gauge") == 1

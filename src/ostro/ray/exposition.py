"""Merges the metrics of several replicas into one Prometheus exposition. Knows the format; knows no metric."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


def merged(texts: Mapping[str, str]) -> bytes:
    """`texts` maps replicas to their expositions; the result has all samples, each with a `replica` label."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._families: dict[str, Metric] = {}
        for replica, text in texts.items():
            for family in text_string_to_metric_families(text):
                metric = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, LABEL: replica}, sample.value)

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()

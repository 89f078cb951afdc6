"""Requests that go to all replicas, such as metrics and admin requests. Merges the replicas' answers into one."""

import json
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from ostro.errors import Unavailable
from ostro.ray.forwarded_request import ForwardedRequest
from ostro.ray.replica import WholeAnswer
from ostro.server.admission.auth import ADMIN_PREFIX, METRICS_PATH
from ostro.server.telemetry.metrics import CONTENT_TYPE

NONE_CAME = "No replica has taken the request in time. Try again in a moment."


class AllEngines(Protocol):
    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """Exceptions raised if a replica has died or none is available."""

    def ask_all(self, call: ForwardedRequest) -> Awaitable[Sequence[WholeAnswer | BaseException]]: ...


def concerns_all(method: str, path: str) -> bool:
    return method in ("GET", "POST") and (path == METRICS_PATH or path.startswith(ADMIN_PREFIX + "/"))


async def answer_of_all(engines: AllEngines, call: ForwardedRequest) -> Response:
    """All replicas' answers merged into one, or the first refusal."""
    try:
        answers = [answer for answer in await engines.ask_all(call) if isinstance(answer, WholeAnswer)]
    except TimeoutError:
        raise Unavailable(NONE_CAME) from None
    except engines.faults as fault:
        raise Unavailable(NONE_CAME) from fault
    if not answers:
        raise Unavailable(NONE_CAME)
    for answer in answers:
        if answer.status != HTTPStatus.OK:
            return _copied(answer)
    if call.path == METRICS_PATH:
        body, kind = merged({each.replica: each.body.decode() for each in answers}), CONTENT_TYPE
    else:
        told = {"replicas": {each.replica: json.loads(each.body) for each in answers}}
        body, kind = json.dumps(told).encode(), "application/json"
    response = Response(body, media_type=kind)
    # Keeps the CORS headers.
    response.raw_headers += [pair for pair in answers[0].headers if pair[0].startswith((b"access-control-", b"vary"))]
    return response


def _copied(answer: WholeAnswer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = [(name, value) for name, value in answer.headers if name != b"x-request-id"]
    return response


LABEL = "replica"


def merged(texts: Mapping[str, str]) -> bytes:
    """Several replicas' metrics as one Prometheus exposition. `texts` maps replicas to theirs; the result has all
    samples, each with a `replica` label.
    """
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

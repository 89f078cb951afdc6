"""A request's record as trace data: names, times, attributes. Follows OpenTelemetry's conventions but imports no
library; contains no text of prompts or answers.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ostro.server.dialects.registry import DIALECTS
from ostro.server.telemetry.record import RequestRecord

Value = str | bool | int | float | list[str]
Attributes = dict[str, Value]
_Maybe = dict[str, Value | None]

# By the end of the route template, which may contain the model's name before it.
_OPERATIONS = {
    **{dialect.path.removeprefix("/v1"): dialect.operation for dialect in DIALECTS},
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
    "/embeddings": "embeddings",
    "/rerank": "rerank",
    "/score": "score",
    "/loglikelihood": "loglikelihood",
    "/pseudo_loglikelihood": "pseudo_loglikelihood",
    "/hrm/solve": "solve",
}
_WRITING = ("chat", "text_completion")
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})
# Clients choose the names of models, paths and methods.
_LONGEST_TEXT = 256


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a request, in `time.monotonic` times."""

    name: str
    start: float
    end: float
    attributes: Attributes


def phases_of(record: RequestRecord) -> Iterator[Phase]:
    """The phases it has entered, without gaps. One that it did not leave ends with the request."""
    if record.queued_at is None:
        return
    ended = record.ended or time.monotonic()
    if record.admitted_at is None or record.began is None:
        yield Phase("queue", record.queued_at, ended, {})
        return
    first = record.first_token or ended
    # All processes of a machine share this clock; on a system where they do not, avoid negative durations.
    began = min(max(record.began, record.admitted_at), first)
    yield Phase("queue", record.queued_at, began, {"ostro.gate.seconds": record.admitted_at - record.queued_at})
    yield Phase("prefill", began, first, _known(_tokens_in(record)))
    if record.first_token is not None:
        out = _tokens_out(record) | {"ostro.preemptions": record.preemptions}
        yield Phase("decode", first, max(first, record.last_token or ended), _known(out))


def name_of(record: RequestRecord) -> str:
    """Low-cardinality, unlike paths."""
    method = record.method if record.method in _METHODS else "HTTP"
    return method if record.route is None else f"{method} {record.route}"


def attributes_of(record: RequestRecord) -> Attributes:
    """Attributes of the conventions for HTTP servers and for generative models, as far as known."""
    is_known = record.method in _METHODS
    given: _Maybe = {
        "http.request.method": record.method if is_known else "_OTHER",
        "http.request.method_original": None if is_known else record.method[:_LONGEST_TEXT],
        "http.route": record.route,
        "http.response.status_code": record.status,
        "url.path": record.path[:_LONGEST_TEXT],
        "url.scheme": "http",
        "error.type": error_type(record),
        "ostro.request.id": record.id,
    }
    operation = _operation(record)
    if operation is not None:
        given |= _request_attributes(record, operation) | _response_attributes(record)
    return _known(given)


def error_type(record: RequestRecord) -> str | None:
    if record.error is not None:
        return record.error
    return str(record.status) if record.status is not None and record.status >= 400 else None


def is_failure(record: RequestRecord) -> bool:
    """Whether its span status is an error; client errors do not count."""
    is_refused = record.status is not None and 400 <= record.status < 499
    return error_type(record) is not None and not is_refused


def _operation(record: RequestRecord) -> str | None:
    route = record.route or ""
    return next((name for ending, name in _OPERATIONS.items() if route.endswith(ending)), None)


def _request_attributes(record: RequestRecord, operation: str) -> _Maybe:
    asked: _Maybe = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ostro",
        "gen_ai.request.model": None if record.asked_model is None else record.asked_model[:_LONGEST_TEXT],
        "gen_ai.request.stream": record.stream,
        "ostro.prompts": record.num_prompts or None,
    }
    params = record.params
    if params is None or operation not in _WRITING:
        return asked
    return asked | {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }


def _response_attributes(record: RequestRecord) -> _Maybe:
    return {
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": [*record.finish_reasons] or None,
        "gen_ai.response.time_to_first_chunk": record.ttft_seconds,
        **_tokens_in(record),
        **_tokens_out(record),
    }


def _tokens_in(record: RequestRecord) -> _Maybe:
    return {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }


def _tokens_out(record: RequestRecord) -> _Maybe:
    # The tokens of a non-streamed answer whose client left were not counted.
    is_known = record.prompt_tokens is not None and (record.completion_tokens or record.first_token is None)
    return {"gen_ai.usage.output_tokens": record.completion_tokens if is_known else None}


def _known(given: Mapping[str, Value | None]) -> Attributes:
    return {name: value for name, value in given.items() if value is not None}

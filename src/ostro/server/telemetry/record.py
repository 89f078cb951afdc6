"""The record of one HTTP request, for logs, metrics and traces. Knows no bodies and no keys."""

import time
from dataclasses import dataclass, field

from ostro.sampling_params import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """Facts about one HTTP request. Every part of the server adds what it learns."""

    id: str
    method: str
    path: str
    route: str | None = None
    """The template of its path, such as /v1/models/{id}; None if no route matches."""
    key: str = "anonymous"
    """The label of the request's key; never the key itself."""
    is_operator: bool = False
    """Whether its key is an admin key."""
    may_raise_priority: bool = True
    """Whether it may ask for a negative priority."""
    asked_model: str | None = None
    """The client's name for the model."""
    model: str | None = None
    stream: bool | None = None
    params: SamplingParams | None = None
    """Sampling parameters. Their numbers may be logged; texts are the client's own."""
    num_prompts: int = 0
    status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    response_id: str | None = None
    error: str | None = None
    """The code of the error that ended it."""
    param: str | None = None
    """The field of the request that the error is about."""
    traceparent: str | None = None
    tracestate: str | None = None
    """The trace that it belongs to, from its headers; set only if tracing is on."""
    trace_id: str | None = None
    span_id: str | None = None
    started: float = field(default_factory=time.monotonic)
    queued_at: float | None = None
    """Time at which it joined the admission queue."""
    admitted_at: float | None = None
    began: float | None = None
    """Time at which the engine's first step with it began."""
    preemptions: int = 0
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    def count(self, tokens: int, finish_reason: str | None) -> None:
        """Counts new tokens of one choice, and its finish reason once it has one."""
        if tokens:
            self.last_token = time.monotonic()
            if self.first_token is None:
                self.first_token = self.last_token
            self.completion_tokens += tokens
        if finish_reason is not None:
            self.finish_reasons.append(finish_reason)

    @property
    def queue_seconds(self) -> float | None:
        """Time in the admission queue, and in the engine's until it first ran, or ended without having run."""
        if self.queued_at is None or self.admitted_at is None:
            return None
        return max(self.began or self.ended or self.admitted_at, self.admitted_at) - self.queued_at

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token is None or not self.stream else self.first_token - self.started

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Generation speed since admission."""
        if not self.completion_tokens or self.admitted_at is None or self.last_token is None:
            return None
        return self.completion_tokens / max(self.last_token - self.admitted_at, 1e-6)

    def fields(self) -> dict[str, object]:
        """The fields of the log line, without those that are not known."""
        given: dict[str, object] = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "key": self.key,
            "model": self.model,
            "stream": self.stream,
            "seconds": _rounded(self.seconds),
            "queue_seconds": _rounded(self.queue_seconds),
            "ttft_seconds": _rounded(self.ttft_seconds),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens if self.prompt_tokens is not None else None,
            "tokens_per_second": _rounded(self.tokens_per_second, 1),
            "finish_reason": ",".join(dict.fromkeys(self.finish_reasons)) or None,
            "error": self.error,
            "param": self.param,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
        }
        return {name: value for name, value in given.items() if value is not None}


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)

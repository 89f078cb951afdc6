"""What every endpoint is given: the models, the gate before them, the limits; and how it answers."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from ostro.sampling_params import SamplingParams
from ostro.server.body import BodyLimits
from ostro.server.limits import Gate
from ostro.server.logging import RequestRecord
from ostro.server.models import Models
from ostro.server.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest, WireModel


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    body: BodyLimits = field(default_factory=BodyLimits)
    ping_seconds: float = 15.0
    """After so long a silence a stream says that it is alive: proxies cut off what is silent for a minute."""
    max_tokens: int | None = None
    """For requests that do not say how many."""
    temperature: float | None = None
    """For requests that name none."""
    seed: int | None = None
    """For requests that bring none; without one here each draws its own."""
    healthz_waits: bool = False
    """Whether /healthz means ready, as /readyz does, rather than alive."""

    def params(self, request: CompletionRequest | ChatCompletionRequest | GenerateRequest) -> SamplingParams:
        """What a request asks for, with this server's defaults for what it leaves open."""
        given, changes = request.model_fields_set, dict[str, object]()
        if self.max_tokens is not None and not given & {"max_tokens", "max_completion_tokens"}:
            changes["max_tokens"] = self.max_tokens
        if self.temperature is not None and "temperature" not in given:
            changes["temperature"] = self.temperature
        params = request.sampling_params()
        if self.seed is not None and params.seed is None:
            changes["seed"] = self.seed
        return params.with_changes(**changes) if changes else params


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    models: Models
    gate: Gate
    options: HttpOptions
    started: int = field(default_factory=lambda: int(time.time()))


def json_response(body: WireModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def record_of(http: Request) -> RequestRecord:
    """The request's record, which the request log has put there."""
    record = http.scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record
